"""The random streams that augmentations draw from (the `stream` of rng.uniform). No two draws share one."""

from __future__ import annotations

FLIP = range(10, 11)
SHIFT = range(11, 13)  # down, right
TRIES = 10  # of a random box
CROP = range(20, 20 + 2 * TRIES + 2)  # area and aspect ratio of each try, then the position down and right
ERASE = range(50, 50 + 2 * TRIES + 4)  # the same, then whether to erase, and the noise
JITTER = range(80, 84)  # brightness, contrast, saturation, hue
OPERATION = range(100, 120)  # one for each operation of a sequence
SIGN = range(120, 140)  # the same
MIXER = range(140, 141)  # which of several mixing options
MIXUP = range(142, 143)  # the share
CUTMIX = range(144, 147)  # the same, then the position down and right
