# SPDX-License-Identifier: Apache-2.0
"""Tables of copies that are cut, merged or reversed move the same bytes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_overlay.transfer.copy_table import CopyTable

steps = st.integers(300, 400)
copies = st.tuples(
    st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.integers(1, 5), st.integers(1, 300), steps, steps
)


def bytes_of(table: CopyTable) -> dict[int, int]:
    """Where each byte of the targets comes from."""
    return {
        target + row * target_step + place: source + row * source_step + place
        for source, target, rows, row_bytes, source_step, target_step in table.fields.T.tolist()
        for row in range(rows)
        for place in range(row_bytes)
    }


@settings(deadline=None)
@given(copy=copies, unit=st.integers(1, 700))
def test_cut_tables_move_the_same_bytes(copy: tuple[int, int, int, int, int, int], unit: int) -> None:
    table = CopyTable.of([copy])
    expected = bytes_of(table)
    at_units, in_pieces = table.cut_at(unit), table.in_pieces(unit)
    assert bytes_of(at_units) == bytes_of(in_pieces) == bytes_of(table.in_rows()) == expected
    assert {source: target for target, source in expected.items()} == bytes_of(table.reversed())
    assert at_units.num_bytes == in_pieces.num_bytes == table.num_bytes == len(expected)
    assert in_pieces.row_bytes.max() <= unit and (in_pieces.rows == 1).all()
    num_units = (table.targets[0] + (copy[2] - 1) * copy[5] + copy[3] - 1) // unit - table.targets[0] // unit + 1
    assert len(at_units) <= 3 * num_units
    rows = at_units.in_rows()
    assert (rows.targets // unit == (rows.targets + rows.row_bytes - 1) // unit).all()


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9), gaps=st.sets(st.integers(1, 8)), data=st.data())
def test_merging_joins_neighbours_and_no_others(sizes: list[int], gaps: set[int], data: st.DataObject) -> None:
    """A gap is on one of the sides, or one of the two is more than a row."""
    source, target, found = 1000, 0, []
    for place, size in enumerate(sizes):
        kind = data.draw(st.sampled_from(["source", "target", "rows"])) if place in gaps else ""
        if kind == "rows":
            found.append((source, target, 2, 1, 1, 1))
            source, target = source + 2, target + 2
        source, target = source + (kind == "source"), target + (kind == "target")
        found.append((source, target, 1, size, size, size))
        source, target = source + size, target + size
    table = CopyTable.of(found)
    assert bytes_of(table.merged()) == bytes_of(table)
    several = int((table.rows > 1).sum())
    assert len(table.merged()) == 1 + len([gap for gap in gaps if gap < len(sizes)]) + several


def test_a_row_between_the_rows_of_another_copy_stays_apart() -> None:
    table = CopyTable.of([(0, 100, 2, 1, 3, 3), (1, 101, 1, 2, 2, 2)])
    assert bytes_of(table.merged()) == bytes_of(table) == {100 + place: place for place in range(4)}


@given(power=st.integers(0, 6), fields=st.lists(st.integers(1, 1000), min_size=5, max_size=5))
def test_vectors_divide_all_numbers_but_those_of_rows(power: int, fields: list[int]) -> None:
    source, target, *sizes = [number << power for number in fields]
    expected = next(width for width in (16, 8, 4, 2, 1) if not any(n % width for n in (source, target, *sizes)))
    assert CopyTable.of([(source, target, 3, *sizes)]).vector_bytes == expected
    assert CopyTable.of([]).vector_bytes == 16


def test_no_copies_are_a_table_too() -> None:
    empty = CopyTable.joined([])
    for table in (empty, empty.reversed(), empty.merged(), empty.in_rows(), empty.cut_at(1), empty.in_pieces(1)):
        assert (len(table), table.num_bytes, table.fields.shape) == (0, 0, (6, 0))
    assert empty.vector_bytes == 16
