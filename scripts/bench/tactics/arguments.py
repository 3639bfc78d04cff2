"""Checked argparse types of the tactics verbs: a refusal comes before any work."""

import argparse
import math
from typing import Any, Callable

from .flashinfer_api import torch


def number(kind: type, low: int, below: float = math.inf) -> Callable[[str], Any]:
    """An argparse type: finite numbers of at least `low`, smaller than `below`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value < below:
            bound = f" and below {below}" if math.isfinite(below) else ""
            raise argparse.ArgumentTypeError(
                f"{text!r}: {kind.__name__} of at least {low}{bound} needed"
            )
        return value

    return parse


def device(text: str) -> str:
    """An argparse type: cpu, or a CUDA device that is here."""
    kind, _, index = text.partition(":")
    count = torch.cuda.device_count()
    if text != "cpu" and (kind != "cuda" or not 0 <= int(index or 0) < count):
        raise argparse.ArgumentTypeError(
            f"{text!r}: use cpu or cuda[:NUMBER]; CUDA devices here: {count}"
        )
    return text


def default_device() -> str:
    """cuda where torch can use it, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"
