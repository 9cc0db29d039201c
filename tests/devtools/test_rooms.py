# SPDX-License-Identifier: Apache-2.0
"""The tool that measures rooms and imports, on small packages whose answers are known."""

import subprocess

import pytest

from devtools import rooms
from devtools.rooms import Arrow, When


def write(root, **sources):
    """Files of a package ``house``; two underscores in a name are a folder."""
    for name, text in {"__init__": "", **sources}.items():
        path = root / "house" / f"{name if name == '__init__' else name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return rooms.modules_of_tree(root, "house")


def arrows(modules, source):
    return {(arrow.target, arrow.when) for arrow in rooms.arrows_of(modules) if arrow.source == source}


def test_a_name_from_a_package_is_the_module_of_that_name_where_there_is_one(tmp_path):
    modules = write(tmp_path, a="from house import b, VERSION\nimport house.b\nimport os.path\n", b="")
    assert arrows(modules, "house.a") == {
        ("house.b", When.AT_LOAD), ("house", When.AT_LOAD), ("os.path", When.AT_LOAD)
    }  # fmt: skip


def test_relative_imports_are_followed(tmp_path):
    modules = write(tmp_path, kitchen__stove="from . import sink\nfrom ..hall import door\n", kitchen__sink="", hall="")
    assert arrows(modules, "house.kitchen.stove") == {
        ("house.kitchen.sink", When.AT_LOAD), ("house.hall", When.AT_LOAD)
    }  # fmt: skip


def test_relative_imports_of_a_package_begin_at_its_own_folder(tmp_path):
    (tmp_path / "house" / "kitchen").mkdir(parents=True)
    (tmp_path / "house" / "kitchen" / "__init__.py").write_text("from . import stove\nfrom ..hall import door\n")
    modules = write(tmp_path, kitchen__stove="", hall="")
    assert arrows(modules, "house.kitchen") == {("house.kitchen.stove", When.AT_LOAD), ("house.hall", When.AT_LOAD)}


def test_imports_in_functions_and_for_type_checking_are_told_apart(tmp_path):
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.b\nelse:\n    import house.c\n"
        "class A:\n    import house.d\n    def f(self):\n        import house.e\ntry:\n    import house.f\n"
        "except ImportError:\n    pass\n"
    )
    modules = write(tmp_path, a=source, b="", c="", d="", e="", f="")
    when = {target: when for target, when in arrows(modules, "house.a") if target.startswith("house")}
    assert when == {
        "house.b": When.TYPE_CHECKING, "house.c": When.AT_LOAD, "house.d": When.AT_LOAD,
        "house.e": When.IN_A_FUNCTION, "house.f": When.AT_LOAD,
    }  # fmt: skip


def graph(modules):
    return rooms.graph_of(rooms.arrows_of(modules), modules)


def test_a_circle_is_found_also_over_several_modules(tmp_path):
    modules = write(tmp_path, a="import house.b", b="import house.c", c="import house.a", d="import house.a")
    assert rooms.circles_of(graph(modules)) == [["house.a", "house.b", "house.c"]]


def test_a_circle_that_a_function_closes_is_none_at_load(tmp_path):
    modules = write(tmp_path, a="import house.b", b="def f():\n    import house.a")
    assert rooms.circles_of(graph(modules)) == []


def test_the_longest_chain_stays_inside_its_room(tmp_path):
    modules = write(
        tmp_path,
        cellar__a="import house.cellar.b\nimport house.cellar.c\n",
        cellar__b="import house.cellar.c\n",
        cellar__c="import house.attic\n",
        attic="",
    )
    chain = ["house.cellar.a", "house.cellar.b", "house.cellar.c"]
    assert rooms.longest_chain(graph(modules), "house.cellar") == chain
    assert rooms.longest_chain(graph(modules), "house") == [*chain, "house.attic"]


def test_there_is_no_longest_chain_where_there_is_a_circle(tmp_path):
    modules = write(tmp_path, a="import house.b", b="import house.a")
    with pytest.raises(ValueError, match=r"house\.a, house\.b import each other"):
        rooms.longest_chain(graph(modules), "house")


def test_the_report_counts_files_and_lines_of_each_room(tmp_path):
    modules = write(tmp_path, a="import os\n", cellar__b="1\n2\n3\n", cellar__c="1\n")
    lines = [line.split() for line in rooms.report(modules).splitlines()]
    assert ["house", "2", "1", "a.py", "1"] in lines
    assert ["house/cellar", "2", "4", "b.py", "3"] in lines
    assert ["all", "4", "5"] in lines


def test_a_revision_is_read_from_git_and_not_from_the_files(tmp_path):
    def git(*arguments):
        who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    before = write(tmp_path, a="import house.b\n", b="")
    git("init")
    git("add", ".")
    git("commit", "-m", "before")
    (tmp_path / "house" / "a.py").unlink()
    assert rooms.modules_of_revision("HEAD", tmp_path, "house") == before
    assert Arrow("house.a", "house.b", When.AT_LOAD, 1) in rooms.arrows_of(before)


def test_an_unknown_revision_is_wrong_usage(capfd):
    assert rooms.main(["--git", "no-such-revision"]) == 2
    assert "no-such-revision" in capfd.readouterr().err
