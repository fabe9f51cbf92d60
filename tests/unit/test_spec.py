"""Options: what is accepted, what is refused in which words, and argv and back."""

from __future__ import annotations

import dataclasses
import math
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpcdask.errors import UsageError
from hpcdask.runner.options import parse
from hpcdask.spec.argv import make_command, option_name, options, read
from hpcdask.spec.parsing import (
    parse_device_memory,
    parse_libraries,
    parse_memory,
    parse_resources,
    parse_seconds,
)
from hpcdask.spec.specs import RunSpec, WorkerSpec

# --- forms ----------------------------------------------------------------------------------------

#: Parser, value, and what it is read from.
FORMS = [
    (parse_memory, 64 << 30, ["64GiB", "64 GiB", 64 << 30]),
    (parse_memory, 64 * 10**9, ["64GB", "64e9", "64000000000"]),
    (parse_memory, 1_500_000_000, ["1.5 GB"]),
    (parse_memory, 0, ["0", 0]),
    (parse_memory, None, ["auto", None]),
    (parse_device_memory, 0.8, ["0.8", "80%", "80 %", 0.8]),
    (parse_device_memory, 0.125, ["12.5%"]),
    (parse_device_memory, 1.0, ["100%", "1"]),
    (parse_device_memory, 100 << 30, ["100GiB", 100 << 30]),
    (parse_device_memory, 0, [0, "0", "none"]),
    (parse_device_memory, None, ["auto", None]),
    (parse_libraries, ("cupy",), ["cupy", ["cupy"]]),
    (parse_libraries, ("numba", "cupy"), ["numba,cupy", "numba cupy, numba"]),
    (parse_libraries, (), ["none", "", (), None]),
    (parse_seconds, 90, ["90s", "1m30s", "00:01:30", 90, timedelta(seconds=90)]),
    (parse_seconds, 7200, ["2 hours", "120 min", "2h"]),
    (parse_seconds, 86400, ["1-00:00:00"]),
    (parse_seconds, 0.5, ["0.5", "500ms"]),
    (parse_seconds, None, ["none", None]),
    (parse_resources, {"GPU": 2.0}, ["GPU=2", {"GPU": 2}]),
    (parse_resources, {"GPU": 2.0, "MEM": 1e10}, ["GPU=2 MEM=10e9", "GPU=2,MEM=1e10"]),
    (parse_resources, None, [None]),
]


@pytest.mark.parametrize(
    ("parser", "value", "text"),
    [(parser, value, text) for parser, value, texts in FORMS for text in texts],
)
def test_forms(parser, value, text):
    parsed = parser(text, "--option")
    assert parsed == value
    assert isinstance(parsed, float) == isinstance(value, float) or parser is parse_seconds
    assert parser(parsed, "--option") == parsed


def from_argv(argv: list[str]) -> WorkerSpec:
    """Read the options of a worker as `worker_extra_args` and the workers of jobs do."""
    return WorkerSpec(**read(make_command("worker", "", options(WorkerSpec)), argv))


def test_a_switch_is_on_off_or_ucx_s_choice():
    for argv, value in ([], None), (["--enable-nvlink"], True), (["--disable-nvlink"], False):
        spec = from_argv(argv)
        assert spec.enable_nvlink is value
        assert spec.to_argv() == argv
    with pytest.raises(UsageError, match="--enable-nvlink: 'yes' is not one of True, False, None"):
        WorkerSpec(enable_nvlink="yes")


@pytest.mark.parametrize(
    ("parser", "text", "forms"),
    [
        *((parse_memory, text, "64GiB") for text in ("", "64 bananas", "-1GiB", "GiB", 0.5)),
        *((parse_device_memory, text, "80%") for text in ("", "150%", 1.5, "0%", -1)),
        *((parse_seconds, text, "1h30m") for text in ("", "soon", "-5s", 0, "30:00:0", "inf")),
        *((parse_resources, text, "GPU=2") for text in ("GPU", "=2", "GPU=-1", {"a b": 1})),
    ],
)
def test_bad_values_are_told_with_the_option_and_the_forms(parser, text, forms):
    with pytest.raises(UsageError) as caught:
        parser(text, "--option")
    for word in ("--option", repr(text), forms):
        assert word in str(caught.value)


@pytest.mark.parametrize("parser", [parse_memory, parse_device_memory, parse_seconds])
@given(text=st.text() | st.from_regex(r"-?[0-9.:e]{1,9} ?[a-zA-Z%]{0,3}", fullmatch=True))
@example(text="1e400")
@example(text="1e-400")
@example(text="\u0663GiB")
@example(text=".")
@example(text="99999999999999999999-00:00:00")
def test_any_text_is_a_finite_amount_or_a_usage_error(parser, text):
    message, value = "", None
    try:
        value = parser(text, "--option")
    except UsageError as error:
        message = str(error)
    assert value is None or (value >= 0 and math.isfinite(value))
    assert not message or any(word in message for word in ("Accepted:", "an idle worker"))
    assert "\n" not in message


# --- the specs ------------------------------------------------------------------------------------

# What a shell hands over; a leading dash would be an option, and click drops empty values
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
    lambda word: not word.startswith("-")
)
KEYS = st.text(st.characters(categories=("L", "N")), min_size=1)
LIBRARIES = st.lists(st.sampled_from(["cupy", "torch", "numba"]), unique=True)
TEXT, COUNT, TIME = st.none() | WORDS, st.none() | st.integers(1, 10_000), st.floats(0.001, 1e7)
DEVICE_MEMORY = st.none() | st.just(0) | st.integers(2, 1 << 45) | st.floats(0.01, 1.0)
FIELDS = {
    **dict.fromkeys(("interface", "local_directory", "name"), TEXT),
    **dict.fromkeys(("rmm_pool_size", "device_memory_limit"), DEVICE_MEMORY),
    **dict.fromkeys(("preload", "preload_nanny"), st.lists(WORDS, max_size=2).map(tuple)),
    **dict.fromkeys(("lifetime", "lifetime_stagger"), st.none() | TIME),
    **dict.fromkeys(("rmm_async", "lifetime_restart"), st.booleans()),
    "device": st.sampled_from(["auto", "cuda", "cpu"]),
    "protocol": st.sampled_from(["auto", "tcp", "ucx"]),
    "port_range": st.none() | st.just("20000-20999"),
    "nthreads": COUNT,
    "memory_limit": st.none() | st.just(0) | st.integers(128 << 20, 1 << 45),
    "enable_nvlink": st.none() | st.booleans(),
    "rmm_allocator_external_lib_list": LIBRARIES.map(tuple),
    "resources": st.none() | st.dictionaries(KEYS, st.floats(0, 1e12), min_size=1, max_size=3),
    "death_timeout": TIME,
}
RUN_FIELDS = {
    **dict.fromkeys(("scheduler_file", "dashboard_address"), TEXT),
    **dict.fromkeys(("tls", "oversubscribe"), st.booleans()),
    "groups": st.sampled_from([(), ("auto",), ("gpu:4", "cpu:2"), ("cpu:16",)]),
    "timeout": TIME,
    "workers_min": COUNT,
}


def test_every_field_is_drawn():
    assert {field.name for field in dataclasses.fields(RunSpec)} == {*FIELDS, *RUN_FIELDS}


@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_worker_spec_to_argv_and_back(values):
    spec = WorkerSpec(**values)
    argv = spec.to_argv()
    assert all(isinstance(part, str) for part in argv)
    assert from_argv(argv) == spec


@given(st.fixed_dictionaries({}, optional={**FIELDS, **RUN_FIELDS}), st.lists(WORDS))
def test_run_spec_survives_the_command_line(values, arguments):
    spec = RunSpec(**values)
    launch = parse([*spec.to_argv(), "script.py", *arguments])
    assert launch.spec.configured() == spec
    assert launch.program is not None
    assert (launch.program.target, launch.program.arguments) == ("script.py", arguments)


@given(st.lists(WORDS | st.sampled_from(["--device", "-m", "--help", "--", "-x"])))
def test_what_follows_the_program_is_the_program_s(arguments):
    launch = parse(["--device", "cpu", "-m", "package.module", *arguments])
    assert launch.program is not None
    assert launch.program.is_module
    assert launch.program.target == "package.module"
    assert launch.program.arguments == arguments
    assert launch.spec.configured() == RunSpec(device="cpu")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nonsense"], ["--nonsense", "--help"]),
        (["--memory-limt", "1GB"], ["--memory-limt", "--memory-limit"]),
        (["--timeout"], ["--timeout"]),
        (["-m"], ["-m", "hpcdask.bench"]),
        (["--device", "wide", "x.py"], ["--device", "'wide'", "cuda", "cpu"]),
        (["--nthreads", "1.5", "x.py"], ["--nthreads", "'1.5'", "whole number"]),
    ],
)
def test_bad_command_line(argv, words):
    with pytest.raises(UsageError) as caught:
        parse(argv)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("word", "has_all"), [("--help", False), ("--help-all", True)])
def test_help_has_the_usual_options_or_all(capsys, word, has_all):
    with pytest.raises(SystemExit) as caught:
        parse([word])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "--device" in printed
    assert "--help-all" in printed
    names = [option_name(field.name) for field in dataclasses.fields(RunSpec)]
    assert all(name in printed for name in names) == has_all


@pytest.mark.parametrize(("name", "value"), [("device", "gpu"), ("nthreads", 0), ("tls", "no")])
def test_a_spec_is_checked_however_it_is_made(name, value):
    with pytest.raises(UsageError, match=option_name(name)):
        RunSpec(**{name: value})
