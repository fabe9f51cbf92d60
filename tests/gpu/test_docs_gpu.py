"""The program for GPUs that a newcomer copies runs as it stands on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpu_launching import run_python
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

PAGE = Path(__file__).parents[2] / "docs" / "getting-started.md"


def test_the_first_program_for_gpus(gpus: list[Gpu], tmp_path: Path) -> None:
    program = re.search(r"^cat > gpu.py <<'EOF'\n(.*?)^EOF$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "gpu.py").write_text(program[1])
    done = run_python("-m", "hpcdask.run", "gpu.py", cwd=tmp_path, timeout=170)
    assert f"{len(gpus)} worker" in done.stderr
    assert done.stdout in ("mean 0.0\n", "mean -0.0\n")
