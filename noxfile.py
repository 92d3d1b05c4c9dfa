"""Everything that is checked, each under a name: `nox` runs what a change must pass, `nox -s all` the rest as well."""

from __future__ import annotations

import os

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True

EVERYTHING = "-e", ".[demo,dev]"
CODE = "src", "plugins", "examples", "tests", "noxfile.py"


def install(session: nox.Session, *what: str) -> None:
    """Install into the session's environment; with --no-venv what is needed is there already."""
    if session.venv_backend != "none":
        session.install(*what)


@nox.session
def tests(session: nox.Session) -> None:
    """Every test but those that start a real engine, with what they cover; the core must be covered whole."""
    install(session, *EVERYTHING)
    session.run("coverage", "erase")
    session.run("pytest", "-n", "2", "-m", "not e2e", "--cov", "--cov-report=", *session.posargs)
    session.run("coverage", "report")
    if not session.posargs:
        session.run("coverage", "report", "--include=*/llmgw/core/*", "--fail-under=100")


@nox.session
def simulation(session: nox.Session) -> None:
    """Fleets over days of faults, the core alone: 200 seeds of 24 hours and 12 nodes, unless told otherwise.

    --seeds, --hours and --nodes choose how much, --seed one to play again, --over-links the larger size, --figures how
    fast it goes; docs/simulation.md has more.
    """
    install(session, *EVERYTHING)
    session.run("python", "tests/simulation/play.py", *session.posargs)


@nox.session
def e2e(session: nox.Session) -> None:
    """A real engine with a real model, fetched when it is not there."""
    install(session, *EVERYTHING)
    session.run("pytest", "-m", "e2e", *session.posargs)


@nox.session(name="e2e-vllm")
def e2e_vllm(session: nox.Session) -> None:
    """A real vLLM on the CPU, served, checked and broken; and SGLang's own argument parser.

    Installs 3.5 GB, once; LLMGW_TEST_VLLM names an environment that has them.
    """
    install(session, *EVERYTHING)
    kept = os.path.abspath(os.environ.get("LLMGW_TEST_VLLM") or os.path.join(session.cache_dir, "vllm"))
    if "LLMGW_TEST_VLLM" not in os.environ:
        session.run("python", "tests/e2e_vllm/install.py", kept)
    environ = {"LLMGW_TEST_VLLM": kept, "LLMGW_TEST_SGLANG_PYTHON": os.path.join(kept, "bin", "python")}
    # By name: they are no part of what a plain run of the tests collects.
    files = ("tests/e2e_vllm/vllm_served.py", "tests/plugins/sglang/real_parser.py")
    session.run("pytest", *files, *session.posargs, env=environ)


@nox.session
def gpu(session: nox.Session) -> None:
    """What a machine with an NVIDIA GPU says of itself; skipped where there is none."""
    install(session, *EVERYTHING)
    # By name: it is no part of what a plain run of the tests collects.
    session.run("pytest", "tests/gpu/real_gpus.py", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """Real clients against a real port."""
    install(session, *EVERYTHING)
    session.run("pytest", "tests/conformance", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, which room knows which, and the rules of the house."""
    install(session, *EVERYTHING)
    session.run("ruff", "check", *CODE)
    session.run("ruff", "format", "--check", *CODE)
    session.run("lint-imports", "--no-cache")
    session.run("pytest", "tests/test_house.py", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strictly."""
    install(session, *EVERYTHING)
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Examples load, links lead somewhere, and what is in the program is in the docs."""
    install(session, *EVERYTHING)
    session.run("pytest", "tests/test_docs.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Figures of this machine, beside those of other proxies: no test, and nothing fails for being slow."""
    install(session, *EVERYTHING)
    session.run("python", "tests/bench/run.py", *session.posargs)


@nox.session(name="all", venv_backend="none")
def everything(session: nox.Session) -> None:
    """All of the above but the figures."""
    for name in ("lint", "types", "docs", "tests", "simulation", "conformance", "e2e"):
        session.notify(name)
