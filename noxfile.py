"""Sessions over several Pythons: `nox -s lint`, `nox -s unit`, `nox -s real`. `make test` needs only one of them."""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "unit"]
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    session.install("--editable", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("mypy")


@nox.session(python=PYTHONS)
def unit(session: nox.Session) -> None:
    session.install("--editable", ".[dev]")
    session.run("pytest", "tests/unit", *session.posargs)


@nox.session(python="3.11")
def real(session: nox.Session) -> None:
    """Makes the environments with a real vLLM on first use."""
    session.install("--editable", ".[dev]")
    session.run("pytest", "tests/real", "-n", "2", "--dist", "loadgroup", *session.posargs)
