"""Types of command-line options: text to value, or a complaint that argparse tells with the option's name."""

from __future__ import annotations

import argparse

from hetero_api.cpu_list import parse_cpu_list
from hetero_api.numa_policy import NumaPolicy


def host_port(text: str) -> str:
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return text


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def seconds_or_none(text: str) -> float:
    return 0.0 if text == "0" else seconds(text)


def core_list(text: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def cuda_device(text: str) -> int | None:
    """Index of the device of "cuda:N"; None for "cpu"."""
    kind, separator, index = text.partition(":")
    if text == "cpu":
        return None
    if kind != "cuda" or not separator or not index.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda:N")
    return int(index)


def numa_policy(text: str) -> NumaPolicy:
    try:
        return NumaPolicy(text)
    except ValueError:
        names = ", ".join(NumaPolicy)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {names}") from None
