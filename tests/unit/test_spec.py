"""Options: what is accepted, what is refused in which words, and argv and back."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpcdask.errors import UsageError
from hpcdask.runner.options import parse
from hpcdask.spec.argv import option_name
from hpcdask.spec.parsing import parse_device_memory, parse_memory, parse_resources, parse_seconds
from hpcdask.spec.specs import RunSpec, WorkerSpec

SWITCHES = ("enable_nvlink",)

# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 << 30),
        ("64 GiB", 64 << 30),
        ("64GB", 64 * 10**9),
        ("512MiB", 512 << 20),
        ("8e9", 8 * 10**9),
        ("1.5 GB", 1_500_000_000),
        ("1e9", 10**9),
        (1 << 30, 1 << 30),
        ("0", 0),
        ("auto", None),
        (None, None),
    ],
)
def test_memory(text, nbytes):
    assert parse_memory(text, "--memory-limit") == nbytes


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0.8", 0.8),
        ("80%", 0.8),
        ("80 %", 0.8),
        ("12.5%", 0.125),
        (0.5, 0.5),
        ("100%", 1.0),
        ("100GiB", 100 << 30),
        (5 << 30, 5 << 30),
        ("1", 1.0),
        ("auto", None),
        (None, None),
        (0, 0),
        ("0", 0),
        ("none", 0),
    ],
)
def test_device_memory_in_bytes_or_as_a_fraction(text, amount):
    parsed = parse_device_memory(text, "--rmm-pool-size")
    assert parsed == amount
    assert type(parsed) is type(amount)


@pytest.mark.parametrize(
    ("given", "libraries"),
    [
        ("cupy", ("cupy",)),
        ("cupy,torch", ("cupy", "torch")),
        ("numba cupy, numba", ("numba", "cupy")),
        (["torch"], ("torch",)),
        ("none", ()),
        ("", ()),
        ((), ()),
        (None, ()),
    ],
)
def test_list_of_libraries(given, libraries):
    spec = WorkerSpec(rmm_allocator_external_lib_list=given)
    assert spec.rmm_allocator_external_lib_list == libraries
    assert WorkerSpec.from_argv(spec.to_argv()) == spec


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_on_off_or_ucx_s_choice(name):
    on, off = option_name(name), option_name(name).replace("--enable-", "--disable-")
    assert getattr(WorkerSpec.from_argv([on]), name) is True
    assert getattr(WorkerSpec.from_argv([off]), name) is False
    assert getattr(WorkerSpec.from_argv([]), name) is None
    assert WorkerSpec(**{name: False}).to_argv() == [off]
    with pytest.raises(UsageError, match=f"{on}: 'yes' is not one of True, False, None"):
        WorkerSpec(**{name: "yes"})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("2 min", 120),
        ("1h30m", 5400),
        ("1h", 3600),
        ("2 hours", 7200),
        ("00:30:00", 1800),
        ("1-00:00:00", 86400),
        ("0.5", 0.5),
        ("500ms", 0.5),
        (30, 30),
        (None, None),
    ],
)
def test_seconds(text, seconds):
    assert parse_seconds(text, "--timeout") == seconds


@pytest.mark.parametrize(
    ("text", "resources"),
    [
        ("GPU=2", {"GPU": 2.0}),
        ("GPU=2 MEM=10e9", {"GPU": 2.0, "MEM": 1e10}),
        ("GPU=2,MEM=1", {"GPU": 2.0, "MEM": 1.0}),
        ({"GPU": 1}, {"GPU": 1.0}),
        (None, None),
    ],
)
def test_resources(text, resources):
    assert parse_resources(text, "--resources") == resources


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
    assert not message or (
        ("Accepted:" in message or "an idle worker" in message) and "\n" not in message
    )


# --- the specs ------------------------------------------------------------------------------------

COUNTS = st.none() | st.integers(1, 10_000)
SECONDS = st.none() | st.floats(0.001, 1e7)
DEVICE_MEMORY = st.none() | st.just(0) | st.integers(2, 1 << 45) | st.floats(0.01, 1.0)
SWITCH = st.none() | st.booleans()
# What a shell hands over; a leading dash would be an option, and click drops empty values
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
    lambda word: not word.startswith("-")
)
KEYS = st.text(st.characters(categories=("L", "N")), min_size=1)
FIELDS = {
    "device": st.sampled_from(["auto", "cuda", "cpu"]),
    "protocol": st.sampled_from(["auto", "tcp", "ucx"]),
    "interface": st.none() | WORDS,
    "port_range": st.none() | st.just("20000-20999"),
    "nthreads": COUNTS,
    "memory_limit": st.none() | st.just(0) | st.integers(128 << 20, 1 << 45),
    **dict.fromkeys(SWITCHES, SWITCH),
    "rmm_pool_size": DEVICE_MEMORY,
    "rmm_async": st.booleans(),
    "rmm_allocator_external_lib_list": st.lists(
        st.sampled_from(["cupy", "torch", "numba"]), unique=True
    ).map(tuple),
    "device_memory_limit": DEVICE_MEMORY,
    "local_directory": st.none() | WORDS,
    "name": st.none() | WORDS,
    "resources": st.none() | st.dictionaries(KEYS, st.floats(0, 1e12), min_size=1, max_size=3),
    "preload": st.lists(WORDS, max_size=2).map(tuple),
    "preload_nanny": st.lists(WORDS, max_size=2).map(tuple),
    "lifetime": SECONDS,
    "lifetime_stagger": SECONDS,
    "lifetime_restart": st.booleans(),
    "death_timeout": st.floats(0.001, 1e7),
}
RUN_FIELDS = {
    "scheduler_file": st.none() | WORDS,
    "dashboard_address": st.none() | WORDS,
    "tls": st.booleans(),
    "groups": st.sampled_from([(), ("auto",), ("gpu:4", "cpu:2"), ("cpu:16",)]),
    "oversubscribe": st.booleans(),
    "timeout": st.floats(0.001, 1e7),
    "workers_min": COUNTS,
}


@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_worker_spec_to_argv_and_back(values):
    spec = WorkerSpec(**values)
    argv = spec.to_argv()
    assert all(isinstance(part, str) for part in argv)
    assert WorkerSpec.from_argv(argv) == spec


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


def test_help_has_the_usual_options_first(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "--device" in printed
    assert "--help-all" in printed
    assert "--rmm-async" not in printed


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help-all"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for field in dataclasses.fields(RunSpec):
        assert option_name(field.name) in printed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "gpu"),
        ("nthreads", 0),
        ("nthreads", 1.5),
        ("workers_min", -1),
        ("memory_limit", "x"),
        ("memory_limit", 64),  # GiB were meant
    ],
)
def test_a_spec_is_checked_however_it_is_made(name, value):
    with pytest.raises(UsageError, match=option_name(name)):
        RunSpec(**{name: value})
