"""`make matrix`: the quick tests under other versions of Python, torch and transformers, one environment at a time.

nox -s matrix                       # every cell whose Python is installed; writes the table of docs/versions.md
nox -s "matrix(py3.10-torch2.9-transformers5.2)"       # one
nox -s latest                                          # `make latest`: the newest of everything

torch comes from where pip or uv find it. On Linux that is a build for CUDA of several gigabytes, unless uv is told
otherwise: UV_TORCH_BACKEND=cpu.
"""

import datetime
import json
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["matrix"]
ROOT = Path(__file__).parent
PAGE, RESULTS = ROOT / "docs/versions.md", ROOT / "benchmarks/results/matrix.json"
LATEST = "latest"
CELLS = [
    ("3.10", "2.9.1", "5.2.0"),  # the oldest of each
    ("3.11", "2.13.0", "5.2.0"),
    ("3.11", "2.13.0", "5.10.4"),
    ("3.11", "2.13.0", "5.23.0"),
    ("3.11", "2.13.0", LATEST),
    ("3.13", LATEST, LATEST),
]
QUICK = """
    tests/model/test_model.py tests/model/test_generation.py tests/model/test_self_check.py
    tests/model/test_deprecations.py tests/student/test_build.py tests/train/test_micro_batches.py tests/test_api.py
""".split()
FEW_STEPS = [
    "--scoring.n-examples",
    "8",
    "--align.steps",
    "2",
    "--distill.steps",
    "2",
    "--evaluation.n-examples",
    "4",
]
ASK = """
import json, platform, torch, transformers
print(json.dumps([platform.python_version(), torch.__version__, transformers.__version__]))
"""


def named(python: str, torch: str, transformers: str) -> str:
    """Name a cell by its minor versions: ``py3.10-torch2.9-transformers5.2``."""
    minor = (
        version if version == LATEST else ".".join(version.split(".")[:2])
        for version in (torch, transformers)
    )
    return "py{}-torch{}-transformers{}".format(python, *minor)


@nox.session
@nox.parametrize("python,torch,transformers", [nox.param(*cell, id=named(*cell)) for cell in CELLS])
def matrix(session: nox.Session, torch: str, transformers: str) -> None:
    """Run the quick tests in a fresh environment, record them, and delete it."""
    assert isinstance(session.python, str)
    name = named(session.python, torch, transformers)
    report = Path(session.create_tmp()) / f"{name}.xml"
    try:
        session.install("torch" if torch == LATEST else f"torch=={torch}")
        pin = "transformers" if transformers == LATEST else f"transformers=={transformers}"
        session.install(".[plot]", pin, "pytest", *([] if torch == LATEST else [f"torch=={torch}"]))
        failed = quick_tests(session, name, report)
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)
    if failed:
        session.error(f"{failed} tests failed")


@nox.session
def latest(session: nox.Session) -> None:
    """Install the newest of everything as a user does, without constraints; run quick tests and verify an export.

    Where transformers has a newer minor version than pyproject.toml allows, repeat all that with it: the row "next"
    says whether the limit can be raised.
    """
    scratch = Path(session.create_tmp())
    session.install(os.environ.get("TORCH", "torch"))
    session.install(".[plot]", "pytest")
    allowed = installed(session)[2]
    failed = quick_tests(session, LATEST, scratch / "latest.xml")
    verify_a_run(session, scratch / "run")
    session.install("--upgrade", "transformers")
    if installed(session)[2] != allowed:
        failed += quick_tests(session, "next", scratch / "next.xml")
        verify_a_run(session, scratch / "next")
    else:
        forget("next")
    if failed:
        session.error(f"{failed} tests failed")


def verify_a_run(session: nox.Session, out: Path) -> None:
    """Run the README's first commands, with few steps."""
    shutil.rmtree(out, ignore_errors=True)
    session.run("hybrid-distill", "run", "tiny", *FEW_STEPS, "--out", str(out))
    session.run("hybrid-distill", "verify", str(out / "export"))


def installed(session: nox.Session) -> list[str]:
    """Return the versions of Python, torch and transformers in a session's environment."""
    return json.loads(str(session.run("python", "-c", ASK, silent=True)).splitlines()[-1])


def quick_tests(session: nox.Session, name: str, report: Path) -> int:
    """Run the quick tests in the session's environment, record them, and return how many failed."""
    flags = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not launched",
        f"--junitxml={report}",
        *session.posargs,
    ]
    session.run(
        "python", "-m", "pytest", *QUICK, *flags, success_codes=[0, 1], env={"OMP_NUM_THREADS": "1"}
    )
    return record(name, installed(session), report)


def record(name: str, versions: list[str], report: Path) -> int:
    """Add a cell's counts to the results, write the page anew, and return how many tests failed."""
    suite = ElementTree.parse(report).getroot()[0]
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    wrong = [f"{case.get('classname')}.{case.get('name')}" for case in suite.iter("testcase") if len(case) and
             case[0].tag in ("failure", "error")]  # fmt: skip
    results = json.loads(RESULTS.read_text())
    results[name] = {
        "python": versions[0], "torch": versions[1], "transformers": versions[2],
        "passed": counts["tests"] - failed - counts["skipped"], "failed": failed, "skipped": counts["skipped"],
        "wrong": wrong[:20], "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    write_page(results)
    return failed


def forget(name: str) -> None:
    """Remove a row that no longer applies."""
    results = json.loads(RESULTS.read_text())
    results.pop(name, None)
    write_page(results)


def write_page(results: dict[str, dict[str, object]]) -> None:
    """Write the results, and the table of docs/versions.md from them."""
    RESULTS.write_text(json.dumps({key: results[key] for key in sorted(results)}, indent=1) + "\n")
    columns = ("python", "torch", "transformers", "passed", "failed", "skipped", "date")
    rows = ["| cell | " + " | ".join(columns) + " |", "|" + " --- |" * (1 + len(columns))]
    for key in sorted(results):
        values = " | ".join(str(results[key][column]) for column in columns)
        rows.append(f"| {key} | {values} |")
    table = "\n".join(["<!-- table -->", *rows, "<!-- end -->"])
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(r"<!-- table -->.*<!-- end -->", table, page, flags=re.DOTALL), encoding="utf-8"
    )
