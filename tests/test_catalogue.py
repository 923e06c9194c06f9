"""Every scheme says where it comes from, stands in the table and draws itself."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields

import pytest

from hf_posswap import list_schemes
from hf_posswap.catalogue import paper_of, scheme_table
from hf_posswap.scheme import registry


@pytest.mark.parametrize("name", list_schemes())
def test_first_line_names_scheme_paper_and_link(name):
    cls = registry()[name]
    first = sys.modules[cls.__module__].__doc__.splitlines()[0]
    title, link = paper_of(cls)
    assert first == f"{name} - {title}, {link}"
    assert title
    assert link == cls.paper
    assert link.startswith("https://")


@pytest.mark.parametrize("name", list_schemes())
def test_every_field_is_documented(name):
    described = " ".join(cls.__doc__ or "" for cls in registry()[name].__mro__)
    missing = [field.name for field in fields(registry()[name]) if not re.search(rf"\b{field.name}\b", described)]
    assert missing == []


def test_table_has_a_row_for_every_scheme():
    head, _, *rows = scheme_table().splitlines()
    assert [row.split(" | ")[0] for row in rows] == [f"| `{name}`" for name in list_schemes()]
    assert {row.count(" | ") for row in rows} == {head.count(" | ")}


def test_every_scheme_draws_itself(tmp_path):
    pytest.importorskip("matplotlib")
    from hf_posswap.drawing import draw_all

    written = {path.stem for path in draw_all(tmp_path)}
    assert written == set(registry())
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in written)


def test_nothing_draws_before_it_is_asked():
    code = "import sys, hf_posswap.drawing; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
