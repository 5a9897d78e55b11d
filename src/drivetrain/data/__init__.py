"""What is trained on."""

from drivetrain.data.base import Data, Normalize, Source, Splits, Tensors
from drivetrain.data.cifar10 import Cifar10
from drivetrain.data.decoding import decode
from drivetrain.data.digits import Digits, DigitScenes
from drivetrain.data.huggingface import HuggingFace
from drivetrain.data.images import ImageFolder, Images, LabelsCsv
from drivetrain.data.instructions import Instructions
from drivetrain.data.jsonl import Jsonl, TextFiles
from drivetrain.data.masks import Masks
from drivetrain.data.own import Own
from drivetrain.data.packed import Packed
from drivetrain.data.stream import Stream
from drivetrain.data.synthetic import Synthetic
from drivetrain.data.tabular import Diabetes, Tabular, Wine
from drivetrain.data.text import LabelledTexts, Stdlib, Texts
from drivetrain.data.webdataset import WebDataset
from drivetrain.data.words import Words

__all__ = [
    "Cifar10", "Data", "Diabetes", "DigitScenes", "Digits", "HuggingFace", "ImageFolder", "Images", "Instructions", "Jsonl",
    "LabelledTexts", "LabelsCsv", "Masks", "Normalize", "Own", "Packed", "Source", "Splits", "Stdlib", "Stream", "Synthetic",
    "Tabular", "Tensors", "TextFiles", "Texts", "WebDataset", "Wine", "Words", "decode",
]  # fmt: skip
