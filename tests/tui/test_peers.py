"""Who sends to whom: rows send, columns receive."""

import pytest

from boltmesh.telemetry.snapshot import PeerTotal
from boltmesh.tui.panels.peers import draw_peers, peer_matrix, rank_pairs
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from tests.tui.meshes import change_rank, mesh_job
from tests.tui.samples import job, rank, state

LOOK = Style(UNICODE)


def _peer(operator: str, peer: int, size: float | None) -> PeerTotal:
    return PeerTotal("pipeline", operator, peer, 9, 9000, size)


def test_the_sender_is_believed_and_the_receiver_where_the_sender_is_not_seen() -> None:
    ranks = (
        rank(0, peers=(_peer("send", 1, 100.0), _peer("recv", 2, 30.0))),
        rank(1, peers=(_peer("recv_any_source", 0, 99.0), _peer("send", 0, 5.0))),
    )
    assert rank_pairs(job(ranks=ranks)) == {(0, 1): 100.0, (2, 0): 30.0, (1, 0): 5.0}


def test_several_groups_between_two_ranks_add_up_and_unknown_stays_unknown() -> None:
    ranks = (
        rank(0, peers=(_peer("send", 1, 100.0), _peer("send", 1, 7.0))),
        rank(1, peers=(_peer("send", 0, None), _peer("send", 0, 1.0))),
    )
    assert rank_pairs(job(ranks=ranks)) == {(0, 1): 107.0, (1, 0): None}


def test_what_was_sent_only_outside_of_steps_is_left_out() -> None:
    assert rank_pairs(job(ranks=(rank(0, peers=(_peer("send", 1, 0.0),)),))) == {}


def test_many_ranks_are_added_up_by_stage_and_many_stages_by_runs() -> None:
    snapshot = mesh_job({"pipeline": 8, "data": 2, "tensor": 2})
    whole = sum(size or 0 for size in rank_pairs(snapshot).values())
    for rows, unit, labels in [(32, "rank", 32), (31, "stage", 8), (8, "stage", 8),
                               (7, "stages", 4), (3, "stages", 3)]:  # fmt: skip
        matrix = peer_matrix(snapshot, max_rows=rows)
        assert matrix is not None
        assert (matrix.unit, len(matrix.labels)) == (unit, labels)
        assert matrix.total_bytes == pytest.approx(whole)
    matrix = peer_matrix(snapshot, max_rows=8)
    assert matrix is not None
    assert matrix.cells[0, 1] == 4 * 8e6
    assert (0, 2) not in matrix.cells
    runs = peer_matrix(snapshot, max_rows=3)
    assert runs is not None
    assert runs.labels == ("0-2", "3-5", "6-7")


def test_without_a_pipeline_neighbouring_ranks_stand_together() -> None:
    ranks = tuple(rank(n, peers=(_peer("send", (n + 1) % 6, 10.0),)) for n in range(6))
    matrix = peer_matrix(job(ranks=ranks), max_rows=3)
    assert matrix is not None
    assert (matrix.unit, matrix.labels) == ("ranks", ("0-1", "2-3", "4-5"))
    assert matrix.cells == {(0, 0): 10.0, (0, 1): 10.0, (1, 1): 10.0, (1, 2): 10.0,
                            (2, 2): 10.0, (2, 0): 10.0}  # fmt: skip


def test_a_peer_that_is_not_seen_belongs_to_a_stage_by_the_order_of_the_mesh() -> None:
    snapshot = mesh_job({"pipeline": 2, "data": 4})
    for number in range(4, 8):  # on another host, without coordinates
        snapshot = change_rank(snapshot, number, state="missing", coordinates={}, peers=())
    matrix = peer_matrix(snapshot, max_rows=2)
    assert matrix is not None
    assert matrix.cells == {(0, 1): 4 * 8e6, (1, 0): 4 * 8e6}


def test_nothing_is_drawn_where_nobody_talks_to_one_other() -> None:
    assert draw_peers(state(mesh_job({"data": 4})), 100, 30, LOOK) == []


def test_a_cell_has_its_figure_and_a_shade() -> None:
    ranks = (
        rank(0, peers=(_peer("send", 1, 8e6),)),
        rank(1, peers=(_peer("send", 0, 1e6), _peer("send", 2, None))),
    )
    lines = [line.plain for line in draw_peers(state(job(ranks=ranks)), 100, 30, LOOK)]
    assert "█ 8.00 MB" in lines[3]
    assert "▂ 1.00 MB" in lines[4]
    assert "counting" in lines[4]
    assert lines[2].split() == ["rank", "0", "rank", "1", "rank", "2"]
    text = "\n".join(
        line.plain for line in draw_peers(state(job(ranks=ranks)), 99, 9, Style(ASCII))
    )
    assert text.isascii()


def test_where_no_matrix_fits_there_is_a_sentence() -> None:
    snapshot = mesh_job({"pipeline": 2, "data": 1})
    assert len(draw_peers(state(snapshot), 27, 10, LOOK)) == 2  # one column says nothing
    (line,) = draw_peers(state(snapshot), 60, 2, LOOK)
    assert line.plain == "point to point: 16.0 MB per step"
