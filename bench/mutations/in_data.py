# ruff: noqa: E501
"""Faults of data: loaders, sources, held-out sets, augmentation."""

from __future__ import annotations

from bench.mutations.fault import Fault

LOADER = "tests/loader/test_loader.py"
TREES = "tests/loader/test_trees.py"
AUGMENT = "tests/augment/test_augment.py"
AUGMENTS = "tests/augment/test_options.py"
MIXED = "tests/augment/test_pipeline.py"
HELD = "tests/data/test_validation.py"
DATA = "tests/data/test_data.py"
SAMPLES = "tests/data/test_samples.py"
BAD = "tests/data/test_bad_samples.py"

FAULTS = (
    Fault("pipeline: normalised twice", "loader/base.py", "            on_device = on_device._replace(normalize=None)  # readers normalise, so that the loop does not\n", "            pass\n", LOADER),
    Fault("pipeline: views have the same random numbers", "loader/base.py", "seed=rng.mix(self.seed, VIEW, number) if number else self.seed", "seed=self.seed", "tests/task/test_tasks.py", "two_views"),
    Fault("pipeline: images of a dict are not augmented", "loader/base.py", "return (values if self.images is None else {**x, self.images: values}), y", "return (values if self.images is None else x), y", TREES),
    Fault("loader: a filler counts", "loader/base.py", "request.ready, not request.weight)", "request.ready, False)", "tests/metrics/test_runs.py", "fills_up"),
    Fault("loader: the order of memory is left as it is", "loader/base.py", "        return x.to(memory_format=memory_format)\n", "        return x\n", "tests/loader/test_loader.py", "memory_format"),
    Fault("workers: a broken file is not named", "loader/workers.py", "                    if isinstance(fetched, DataError):\n                        raise fetched\n", "", "tests/loader/test_loader.py", "broken_file"),
    Fault("workers: the seed comes from the model's random stream", "loader/workers.py", "                generator=torch.Generator(),  # else it draws its base seed from the model's random stream\n", "", "tests/loader/test_loader.py", "random_stream"),
    Fault("workers: the limit is counted from the start", "loader/workers.py", "            finally:\n                self._waits_since = None\n", "            finally:\n                pass\n", "tests/loader/test_loader.py", "limit_of_a_wait"),
    Fault("threads: pieces are written to the first rows", "loader/threads.py", "rows = slice(offset, offset + trees.length(x))", "rows = slice(0, trees.length(x))", "tests/loader/test_loader.py", "share_a_batch or last_piece"),
    Fault("threads: the batch is done before its last piece", "loader/threads.py", "last = self.left == 0", "last = self.left <= 1", "tests/loader/test_loader.py", "share_a_batch or last_piece"),
    Fault("threads: they read one batch further ahead", "loader/threads.py", "while len(started) <= self.prefetch_factor and", "while len(started) <= self.prefetch_factor + 1 and", "tests/loader/test_loader.py", "no_further"),
    Fault("threads: a stuck read waits for ever", "loader/threads.py", "if (left := since + self.timeout_s - time.monotonic()) <= 0 or", "if (left := since + 1e9 - time.monotonic()) <= 0 or", "tests/loader/test_loader.py", "stuck_thread"),
    Fault("resident: chunks overlap", "loader/resident.py", "rows = slice(number * CHUNK, number * CHUNK + len(request.indices))", "rows = slice(number * (CHUNK - 1), number * (CHUNK - 1) + len(request.indices))", "tests/loader/test_loader.py", "resident_puts"),
    Fault("resident: data that does not fit is taken", "loader/resident.py", "size > self.share * free:", "size > free / self.share:", "tests/loader/test_loader.py", "resident_that"),
    Fault("held out: the highest keys", "data/validation.py", "    for n, (of_class, size) in enumerate(zip(number.tolist(), sizes.tolist(), strict=True)):", "    for n, (of_class, size) in reversed(list(enumerate(zip(number.tolist(), sizes.tolist(), strict=True)))):", "tests/data/test_validation.py", "every_sample or depends or same"),
    Fault("held out: groups are torn apart", "data/validation.py", "if size / 2 <= left[of_class]:", "if size <= left[of_class]:", "tests/data/test_validation.py", "half_of_it"),
    Fault("held out: samples of both sets", "data/validation.py", "subset(source, (~which).nonzero().flatten())", "subset(source, torch.arange(len(source)))", "tests/data/test_validation.py", "every_sample"),
    Fault("held out: by the order of samples", "data/validation.py", 'digest_size=8, person=b"validation").digest() for content in contents', 'digest_size=8, person=b"validation").digest() for content in (b"%d" % n for n, _ in enumerate(contents))', "tests/data/test_validation.py", "every_sample or depends or same"),
    Fault("held out: classes are left out of account", "data/validation.py", "np.zeros(len(sizes)) if labels is None or one_class else labels[first]", "np.zeros(len(sizes))", "tests/data/test_validation.py", "classes_have"),
    Fault("held out: the count is rounded down", "data/validation.py", "return int(max(share, 1 / samples) * samples + 0.5)", "return int(max(share, 1 / samples) * samples)", "tests/data/test_validation.py", "share or every_sample or count or classes"),
    Fault("normalise: variance in place of deviation", "data/base.py", "per_channel.std(1).tolist()", "per_channel.var(1).tolist()", "tests/data/test_data.py", "deviation or normalis"),
    Fault("normalise: the source is written", "data/base.py", "(values - self.mean).div_(self.std)", "values.sub_(self.mean).div_(self.std) if values.is_floating_point() else (values - self.mean).div_(self.std)", "tests/data/test_data.py", "normalis"),
    Fault("normalise: measured on the first samples alone", "data/base.py", "torch.arange(count) * (len(source) // count)", "torch.arange(min(count, 2))", "tests/data/test_data.py", "normalis"),
    Fault("units: the mean is left out", "data/base.py", "return values * self.std.repeat_interleave(each) + self.mean.repeat_interleave(each)", "return values * self.std.repeat_interleave(each)", "tests/data/test_tables.py", "units"),
    Fault("padding: targets are padded with 0", "data/padding.py", 'value = IGNORE_INDEX if counts and name.split(".")[0] == "y" else 0', "value = 0", SAMPLES),
    Fault("padding: the mask is one too long", "data/padding.py", "torch.arange(length) < torch.tensor(lengths).unsqueeze(1)", "torch.arange(length) <= torch.tensor(lengths).unsqueeze(1)", SAMPLES),
    Fault("padding: on the left", "data/padding.py", "row[: len(tensor)] = tensor", "row[len(row) - len(tensor) :] = tensor", SAMPLES),
    Fault("bad samples: one too many is skipped", "data/bad_samples.py", "if found > self.max_skipped:", "if found > self.max_skipped + 1:", BAD),
    Fault("bad samples: the search does not begin anew", "data/bad_samples.py", "(i % count for i in range(index, index + count))", "range(index, count)", BAD),
    Fault("bad samples: a broken one is read again each time", "data/bad_samples.py", "            if self.bad[candidate]:\n                continue\n", "", BAD),
    Fault("flip: images are turned upside down", "augment/geometry.py", "return where(which.view(-1, 1, 1, 1), x.flip(-1), x)", "return where(which.view(-1, 1, 1, 1), x.flip(-2), x)", AUGMENT),
    Fault("crop: shifts are one too small", "augment/geometry.py", "span = 2 * self.pad + 1", "span = 2 * self.pad", AUGMENT),
    Fault("crop: the border is reflected with its pixel", "augment/geometry.py", "2 * (size - 1) - index, index)", "2 * size - 1 - index, index)", AUGMENT),
    Fault("crop: rows and columns exchanged", "augment/geometry.py", "flat = rows.view(n, h, 1) * w + cols.view(n, 1, w)  # each", "flat = rows.view(n, h, 1) * h + cols.view(n, 1, w).flip(-1)  # each", AUGMENT),
    Fault("crop: masks stay where they are", "augment/geometry.py", "        if pipeline.masks:  # they move by the same draws, pixel by pixel\n", "        if False:\n", "tests/task/test_tasks.py", "mask_moves"),
    Fault("random crop: the aspect is not drawn in its logarithm", "augment/geometry.py", "ratios = torch.exp(math.log(ratio[0]) + aspect * (math.log(ratio[1]) - math.log(ratio[0])))", "ratios = ratio[0] + aspect * (ratio[1] - ratio[0])", "tests/augment/test_options.py", "crop or box"),
    Fault("random crop: the box leaves the image by a pixel", "augment/geometry.py", "return int(right * (width - w + 1)), int(down * (height - h + 1)), w, h", "return int(right * (width - w + 2)), int(down * (height - h + 2)), w, h", "tests/augment/test_options.py", "box"),
    Fault("random crop: files are cut twice", "augment/geometry.py", "        if pipeline.crops:  # the source has cropped them already, while decoding\n", "        if False:\n", "tests/augment/test_pipeline.py", "files_are_cut"),
    Fault("warp: pixels outside repeat the border", "augment/geometry.py", "inside = (cols >= 0) & (cols < w) & (rows >= 0) & (rows < h)", "inside = (cols >= -w) & (rows >= -h)", "tests/augment/test_options.py", "warp or operation"),
    Fault("mixup: the share is the same in every epoch", "augment/mixing.py", "rng.uniform(pipeline.seed, request.epoch, mixed, stream) for stream in mixer.draws", "rng.uniform(pipeline.seed, 0, mixed, stream) for stream in mixer.draws", "tests/augment/test_pipeline.py", "differs_by_epoch"),
    Fault("mixup: labels are mixed the other way", "augment/mixing.py", "first * share.view(-1, 1) + second * (1 - share).view(-1, 1)", "first * (1 - share).view(-1, 1) + second * share.view(-1, 1)", "tests/augment/test_pipeline.py", "targets or never or share_of"),
    Fault("mixup: images are mixed with themselves", "augment/mixing.py", "other = x.index_select(0, partner)", "other = x[: len(partner)]", "tests/augment/test_pipeline.py", "targets or split"),
    Fault("mixup: every sample is mixed", "augment/mixing.py", "mine = (drawn == number) & (whether < mixer.prob)", "mine = drawn == number", "tests/augment/test_pipeline.py", "never or each_sample or targets"),
    Fault("cutmix: the share is not that of the box in the image", "augment/mixing.py", "1 - (height * width).to(share.dtype) / (h * w)", "share", "tests/augment/test_options.py", "cutmix"),
    Fault("cutmix: the side is the area", "augment/mixing.py", "side = torch.sqrt(1 - share)", "side = 1 - share", "tests/augment/test_options.py", "cutmix"),
    Fault("streams: two draws share one", "augment/random_streams.py", "MIXUP = range(141, 143)", "MIXUP = range(140, 142)", "tests/augment/test_options.py", "no_two"),
    Fault("chunks: the last one is lost", "augment/base.py", "zip(*(t.split(size) for t in (x, *each)), strict=True)]", "list(zip(*(t.split(size) for t in (x, *each)), strict=True))[: max(1, len(x) // size)]]", "tests/augment/test_options.py", "mixup or chunk or jitter or hue"),
    Fault("view of targets: mixed samples read only once", "core/microbatch.py", "self.mix_with[~torch.isin(self.mix_with, self.indices)]", "self.mix_with", "tests/augment/test_pipeline.py", "split or partner or targets"),
    Fault("fingerprint: labels do not count", "data/base.py", "hashlib.sha256(name.encode(errors=\"surrogateescape\")).digest()[:8]", "hashlib.sha256(name[:1].encode(errors=\"surrogateescape\")).digest()[:8]", "tests/data/test_data.py", "held_out"),
    Fault("untrusted: a pipe among the data is waited for", "data/untrusted.py", 'flags | getattr(os, "O_NONBLOCK", 0)', "flags", "tests/data/test_untrusted.py", "never_end"),
    Fault("untrusted: a device is read", "data/untrusted.py", "if not stat.S_ISREG(os.fstat(descriptor).st_mode):", "if False:", "tests/data/test_untrusted.py", "never_end"),
)  # fmt: skip
