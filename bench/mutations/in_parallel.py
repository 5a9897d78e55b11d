# ruff: noqa: E501
"""Faults of several ranks: ddp, fsdp, pipeline, tensor, their process groups and launchers."""

from __future__ import annotations

from bench.mutations.fault import Fault

TWO = "tests/parallel/test_two_ranks.py"
PARALLEL = "tests/parallel/test_parallel.py"
CUTS = "tests/parallel/test_cuts.py"
ENVIRONMENT = "tests/parallel/test_environment.py"
HEARTBEAT = "tests/launch/test_heartbeat.py"

FAULTS = (
    Fault("ddp: gradients are exchanged at every micro-batch", "parallel/ddp.py", "            with self.model.no_sync():  # needed around forward and backward\n                self.inner.micro_batch(batch, loss_sum)", "            self.inner.micro_batch(batch, loss_sum)", PARALLEL, "meet_once"),
    Fault("ddp: gradients are never exchanged", "parallel/ddp.py", "        if batch.last:\n", "        if not batch.last:\n", PARALLEL, "meet_once"),
    Fault("ddp: buffers are sent before each forward", "parallel/ddp.py", "wrapped.broadcast_buffers = self.forward_sync_buffers", "wrapped.broadcast_buffers = True", PARALLEL, "buffers or knobs"),
    Fault("ddp: gradients travel in full", "parallel/ddp.py", 'if self.compress != "none":', 'if self.compress == "none":', PARALLEL + " tests/parallel/test_strategies.py", "knobs or bits"),
    Fault("ranks: the flag is a minimum", "parallel/process_group.py", "dist.all_reduce(self._flag, dist.ReduceOp.MAX", "dist.all_reduce(self._flag, dist.ReduceOp.MIN", TWO, "random_numbers"),
    Fault("ranks: a flag that was handled is sent again", "parallel/process_group.py", "self._flag.fill_(0 if agreed else flag)", "self._flag.fill_(flag)", TWO, "random_numbers"),
    Fault("ranks: sums are not added", "parallel/process_group.py", "        dist.all_reduce(sums, group=self.data_group)\n", "", TWO, "random_numbers"),
    Fault("graph of ranks: gradients are those of a rank", "parallel/reducing_step.py", "        if batch.last:\n            with torch", "        if False:\n            with torch", "tests/parallel/test_graph_of_ranks.py", "one_graph"),
    Fault("graph of ranks: gradients are summed", "parallel/reducing_step.py", " / self.ranks for f", " / 1 for f", "tests/parallel/test_graph_of_ranks.py", "one_graph"),
    Fault("graph of ranks: one goes on without the others", "compile/whole_step.py", "not any(parallel.broadcast_object(parallel.gather_object(self._eager)))", "True", "tests/parallel/test_graph_of_ranks.py", "where_one"),
    Fault("ranks: each evaluates its own buffers", "parallel/process_group.py", "        self.broadcast_tensors(list(model.buffers()))\n", "        pass\n", PARALLEL + " " + TWO, "evaluate or buffers"),
    Fault("ranks: the last one's value is that of all", "parallel/process_group.py", "dist.broadcast_object_list(values, src=0,", "dist.broadcast_object_list(values, src=self.world.size - 1,", TWO, "random_numbers"),
    Fault("ranks: the work of waiting counts twice", "parallel/process_group.py", "since, self._reported_work = worked - self._reported_work, worked", "since, self._reported_work = worked, worked", TWO, "random_numbers"),
    Fault("ranks: the fastest is called the slowest", "parallel/process_group.py", "int(works.argmax())", "int(works.argmin())", TWO, "random_numbers"),
    Fault("ranks: on one device they are not refused", "parallel/process_group.py", "if device is not None and len(same) > 1:", "if device is not None and len(same) > 2:", ENVIRONMENT),
    Fault("ranks: different configs are not refused", "parallel/process_group.py", "if len(ranks_by_start) > 1:", "if len(ranks_by_start) > 2:", TWO, "other_configs"),
    Fault("ranks: a port of 65536", "parallel/process_group.py", '0 < int(given.rpartition(":")[2]) < 2**16', '0 < int(given.rpartition(":")[2]) <= 2**16', "tests/launch/test_hosts.py tests/launch/test_faults.py tests/launch/test_heartbeat.py " + PARALLEL, "cannot or ports or port or refused"),
    Fault("ranks: more than devices", "parallel/process_group.py", "self.local_ranks() > found.count:", "self.local_ranks() > found.count + 1:", ENVIRONMENT),
    Fault("random numbers: the same on every rank", "runtime/base.py", "rng.mix(self.seed, 4, world.rank)", "rng.mix(self.seed, 4)", TWO, "random_numbers"),
    Fault("random numbers: another model on every rank", "runtime/base.py", "torch.manual_seed(rng.mix(self.seed, 3))", "torch.manual_seed(rng.mix(self.seed, 3, world.rank))", TWO, "reduces"),
    Fault("sharded: an overflow of one shard is not shared", "parallel/sharded.py", "        dist.all_reduce(found, dist.ReduceOp.MAX)\n", "", TWO, "overflow"),
    Fault("sharded: the smallest overflow counts", "parallel/sharded.py", "dist.all_reduce(found, dist.ReduceOp.MAX)", "dist.all_reduce(found, dist.ReduceOp.MIN)", TWO, "overflow"),
    Fault("sharded: the norm is that of this rank's shards", "parallel/shard_sums.py", "            dist.all_reduce(power, group=mesh.get_group(name))\n", "            pass\n", TWO, "reduces"),
    Fault("sharded: norms are added and not their powers", "parallel/sharded.py", "get_total_norm(group, norm_type) ** norm_type", "get_total_norm(group, norm_type)", TWO, "reduces"),
    Fault("sharded: weights stay gathered after an evaluation", "parallel/sharded.py", "                module.reshard()\n", "                pass\n", TWO, "gathers"),
    Fault("sharded: gradients are reduced at every micro-batch", "parallel/sharded_step.py", "self.root.set_requires_gradient_sync(batch.last)", "self.root.set_requires_gradient_sync(True)", TWO, "reduces"),
    Fault("sharded: gradients are never reduced", "parallel/sharded_step.py", "self.root.set_requires_gradient_sync(batch.last)", "self.root.set_requires_gradient_sync(False)", TWO, "reduces"),
    Fault("sharded: no evaluation in step", "parallel/sharded.py", "    lockstep_evaluation = True\n", "    lockstep_evaluation = False\n", TWO, "tail"),
    Fault("fsdp: weights are resharded whatever is asked for", "parallel/fsdp.py", "reshard_after_forward=self.reshard_after_forward", "reshard_after_forward=True", TWO, "gathers"),
    Fault("fsdp: sync_each_micro is turned around", "parallel/fsdp.py", "self._sync_last_only = not self.sync_each_micro", "self._sync_last_only = self.sync_each_micro", TWO, "reduces"),
    Fault("fsdp: norms in bfloat16", "parallel/fsdp.py", "None if has_norms else dtype", "dtype", "tests/parallel/test_strategies.py " + TWO, "batch_norms or bfloat16"),
    Fault("fsdp: a class keeps torch's name", "parallel/fsdp.py", "    type(block).__name__ = name  #", "    name  #", "tests/parallel tests/compile", "name or fsdp or compiled"),
    Fault("tensor: ranks of one group draw other numbers", "parallel/tensor.py", "return self.world.rank - self.world.rank % self.model_ranks()", "return self.world.rank", ENVIRONMENT + " " + TWO),
    Fault("tensor: the gradient of the input is not summed", "parallel/tensor.py", "grad_placements=[Partial()]", "grad_placements=[Replicate()]", "tests/parallel/test_strategies.py", "tensor"),
    Fault("tensor: q, k and v are not cut apart", "parallel/tensor.py", "distribute_tensor(separate, mesh, [Shard(1)]", "distribute_tensor(separate.flatten(0, 1).unflatten(0, (parts, -1)).roll(1, 0), mesh, [Shard(1)]", "tests/parallel/test_strategies.py", "tensor"),
    Fault("tensor: heads that do not divide", "parallel/tensor.py", "    if number % size:\n", "    if number < size:\n", PARALLEL + " tests/parallel/test_strategies.py tests/launch/test_faults.py", "refused or divide or cannot"),
    Fault("pipeline: micro-batches of other sizes weigh the same", "parallel/pipeline_step.py", "return self._precision.scaled(loss, batch.weight)", "return self._precision.scaled(loss, self._running[0].weight)", TWO, "pipeline"),
    Fault("pipeline: the logged loss has no weights", "parallel/pipeline_step.py", "loss_sum.addcmul_(loss, batch.weight)", "loss_sum.add_(loss)", TWO, "pipeline"),
    Fault("pipeline: shared modules' gradients are not summed", "parallel/pipeline_step.py", "works: list[Any] = [dist.all_reduce(g, group=self._pipeline.stage_group, async_op=True) for g in common]", "works: list[Any] = []", TWO + " tests/parallel/test_strategies.py", "pipeline"),
    Fault("pipeline: gradients of several pipelines are not averaged", "parallel/pipeline_step.py", "            torch._foreach_div_(gradients, pipelines)\n", "", TWO + " tests/parallel/test_strategies.py", "pipelines or data"),
    Fault("pipeline: the stages run the first micro-batch again", "parallel/pipeline_step.py", "self._running[number].x)", "self._running[0].x)", TWO, "pipeline"),
    Fault("pipeline: a residual around blocks is cut", "parallel/stage_checks.py", "atol=1e-4 * scale", "atol=1e4 * scale", CUTS),
    Fault("pipeline: a weight of two stages passes", "parallel/stage_checks.py", "for names in users.values() if len(names) > 1)", "for names in users.values() if len(names) > 9)", CUTS),
    Fault("pipeline: zeros of an untrained model hide a difference", "parallel/stage_checks.py", "        if not p.any():\n", "        if p.ndim > 9:\n", CUTS),
    Fault("pipeline: a stage ends one block late", "parallel/stages.py", "if i + 1 == self._end and", "if i == self._end and", CUTS),
    Fault("pipeline: stages by number of blocks", "parallel/balance.py", "max(best[n - 1][j][0], total[i] - total[j])", "max(best[n - 1][j][0], i - j)", CUTS),
    Fault("pipeline: 1f1b with fewer micro-batches than stages", "parallel/stages.py", 'if name == "1f1b" and micro_batches >= count else ScheduleGPipe', 'if name == "1f1b" and micro_batches > count else ScheduleGPipe', CUTS, "schedule"),
    Fault("slurm: the first node's tasks on every node", "parallel/environment.py", "return counts[node] if node < len(counts) else counts[0]", "return counts[0]", ENVIRONMENT),
    Fault("slurm: a batch script is taken for a step", "parallel/environment.py", 'environ.get("SLURM_STEP_NUM_TASKS", "1")', 'environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")', ENVIRONMENT),
    Fault("split: blocks do not get their inputs", "parallel/onehost.py", "                block.register_forward_pre_hook(_move_inputs_hook(device), with_kwargs=True)\n", "", "tests/parallel tests/loader/test_on_device.py tests/optimizer/test_fake_devices.py", "split or cpu_waits or devices"),
    Fault("split: the host reads before a CPU has its inputs", "parallel/onehost.py", 'non_blocking=device.type != "cpu"', "non_blocking=True", PARALLEL),
    Fault("heartbeat: a busy rank is ended as a stopped one", "launch/heartbeat.py", "self._heartbeat_timeout_s if state in STOPPED else self._stuck_s", "self._heartbeat_timeout_s", HEARTBEAT),
    Fault("heartbeat: a rank that started again is still lost", "launch/heartbeat.py", "            self.ended.pop(rank, None)\n", "            pass\n", HEARTBEAT),
    Fault("heartbeat: checks are not set back by a beat", "launch/heartbeat.py", "checks = checks + 1 if beat == before else 0", "checks = checks + 1 if beat >= before else 0", HEARTBEAT),
    Fault("heartbeat: any end is a failure", "launch/heartbeat.py", "and any(map(_failure_in, results))", "", HEARTBEAT),
)  # fmt: skip
