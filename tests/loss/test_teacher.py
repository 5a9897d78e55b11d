"""The file of a teacher: it may come from a stranger's run."""

import os

import pytest
import safetensors.torch
import torch

from drivetrain.core.errors import UserError
from drivetrain.loss import teacher


def test_a_teachers_file_is_an_ordinary_one(tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, file)
    assert teacher._weights(file, "loss.teacher")["w"].tolist() == [1, 1]
    content = file.read_bytes()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_bytes(content[:-1])):
        file.unlink()
        make(file)
        with pytest.raises(UserError, match=r"loss.teacher=.*is no safetensors file"):
            teacher._weights(file, "loss.teacher")
