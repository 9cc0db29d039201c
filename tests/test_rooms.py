# SPDX-License-Identifier: Apache-2.0
"""The imports of small packages whose answers are known."""

from tests import rooms


def write(root, **sources):
    """Files of a package ``house``; two underscores in a name are a folder."""
    for name, text in {"__init__": "", **sources}.items():
        path = root / "house" / f"{name if name == '__init__' else name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(rooms.modules_of("house", root))


def targets(modules, source):
    return {arrow.target for arrow in rooms.arrows_of(modules) if arrow.source == source}


def test_a_name_from_a_package_is_the_module_of_that_name_where_there_is_one(tmp_path):
    modules = write(tmp_path, a="from house import b, VERSION\nimport house.b\nimport os.path\n", b="")
    assert targets(modules, "house.a") == {"house.b", "house", "os.path"}


def test_relative_imports_are_followed(tmp_path):
    modules = write(tmp_path, kitchen__stove="from . import sink\nfrom ..hall import door\n", kitchen__sink="", hall="")
    assert targets(modules, "house.kitchen.stove") == {"house.kitchen.sink", "house.hall"}


def test_relative_imports_of_a_package_begin_at_its_own_folder(tmp_path):
    (tmp_path / "house" / "kitchen").mkdir(parents=True)
    (tmp_path / "house" / "kitchen" / "__init__.py").write_text("from . import stove\nfrom ..hall import door\n")
    modules = write(tmp_path, kitchen__stove="", hall="")
    assert targets(modules, "house.kitchen") == {"house.kitchen.stove", "house.hall"}


def test_imports_in_functions_and_for_type_checking_are_told_apart(tmp_path):
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.b\nelse:\n    import house.c\n"
        "class A:\n    import house.d\n    def f(self):\n        import house.e\ntry:\n    import house.f\n"
        "except ImportError:\n    pass\n"
    )
    modules = write(tmp_path, a=source, b="", c="", d="", e="", f="")
    found = {arrow.target: arrow.at_load for arrow in rooms.arrows_of(modules) if arrow.target.startswith("house")}
    assert found == {"house.b": False, "house.c": True, "house.d": True, "house.e": False, "house.f": True}


def test_a_circle_is_found_also_over_several_modules(tmp_path):
    modules = write(tmp_path, a="import house.b", b="import house.c", c="import house.a", d="import house.a")
    circle = rooms.circle_of(modules)
    first = circle.index("house.a")
    assert circle[first:] + circle[:first] == ["house.a", "house.b", "house.c"]


def test_a_circle_that_a_function_closes_is_none_at_load(tmp_path):
    modules = write(tmp_path, a="import house.b", b="def f():\n    import house.a")
    assert rooms.circle_of(modules) == []
