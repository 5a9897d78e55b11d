"""The stream numbers of augmentation's draws, all in one place: no two options share one, nor two draws of an option."""

from __future__ import annotations

FLIP = range(10, 11)
SHIFT = range(11, 13)  # down, right
TRIES = 10  # of a random box, before the largest that fits is taken
CROP = range(20, 20 + 2 * TRIES + 2)  # area and aspect of each try, place down and right
ERASE = range(50, 50 + 2 * TRIES + 4)  # the same, whether at all, the noise
JITTER = range(80, 84)  # brightness, contrast, saturation, hue
OPERATION = range(100, 120)  # one for each operation in a row
SIGN = range(120, 140)
TURN = range(140, 141)  # which of several mixing options
MIXUP = range(141, 143)  # whether at all, share
CUTMIX = range(143, 147)  # the same, place down and right
