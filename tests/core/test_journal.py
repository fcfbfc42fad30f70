"""Records as JSON lines: there and back again, byte for byte, and what is said when a line is damaged."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core import journal
from carpool.core.errors import JournalError
from carpool.core.host_resources import HostResources
from carpool.core.journal import Header, JournalWriter, read_journal
from carpool.core.messages import (
    RUN,
    AssignApplied,
    Change,
    DeadlineMissed,
    Fact,
    ForeignProcess,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobResumed,
    JobSubmitted,
    LimitsChanged,
    LinkMeasured,
    NodeJoined,
    NodeLost,
    OutsidersSeen,
    Planned,
    PolicyChanged,
    Probe,
    ProgressReported,
    Record,
    ReleaseApplied,
    ResumabilityChanged,
    WeightChanged,
    Woke,
)
from carpool.core.model import Allocation, JobId, JobSpec, Kind, NodeId, Share
from carpool.core.topology import Bank, Cluster, Link, Node
from carpool.core.typed_fields import printable
from carpool.testing.strategies import mixed_clusters

# Any text as the decoder leaves it: control characters and lone surrogates are escapes by then.
texts = st.text(st.characters(), max_size=8).map(printable)
names = texts.map(JobId)
floats = st.floats(0, 1e9, allow_nan=False)
counts = st.integers(0, 10**6)

job_specs = st.builds(
    JobSpec,
    names,
    st.integers(1, 64),
    st.none() | floats,
    texts,
    counts,
    floats,
    texts,
    min_devices=counts,
    max_devices=counts,
    batch_range=st.none() | st.tuples(counts, counts),
    memory_bytes=counts,
    kinds=st.lists(texts.map(Kind), max_size=2).map(tuple),
    exact=st.booleans(),
    after=st.lists(names, max_size=2).map(tuple),
    retries=st.integers(0, 5),
)
facts: st.SearchStrategy[Fact] = st.one_of(
    st.builds(JobSubmitted, job_specs),
    st.builds(JobCancelled, names),
    st.builds(JobPaused, names),
    st.builds(JobResumed, names),
    st.builds(AssignApplied, names, counts, floats),
    st.builds(ReleaseApplied, names, counts, floats),
    st.builds(ProgressReported, names, counts, floats, floats, st.none() | floats, st.none() | floats),
    st.builds(JobFinished, names, counts),
    st.builds(DeadlineMissed, names),
    st.builds(JobFailed, names, counts, texts),
    st.builds(JobCrashed, names, counts, floats, texts),
    st.builds(NodeJoined, texts, st.lists(st.tuples(texts, counts, counts), max_size=2).map(tuple), replaces=texts),
    st.builds(NodeLost, counts.map(NodeId)),
    st.builds(WeightChanged, names, floats),
    st.builds(LimitsChanged, names, counts, counts),
    st.builds(PolicyChanged, texts),
    st.builds(LinkMeasured, texts, texts, floats, floats),
    st.builds(
        OutsidersSeen,
        counts,
        st.lists(st.builds(ForeignProcess, counts, texts, texts, counts), max_size=2).map(tuple),
        st.booleans(),
    ),
    st.just(Woke()),
)
shares = st.builds(
    Share, st.tuples(counts, st.integers(1, 9)).map(lambda pair: range(pair[0], sum(pair))), floats, st.integers(-2, 2)
)
allocations = st.builds(
    Allocation,
    st.lists(shares, min_size=1, max_size=2).map(tuple),
    counts,
    st.lists(counts, max_size=2).map(tuple),
)
changes = st.builds(Change, names, st.none() | allocations, st.just(RUN) | st.builds(Probe, counts))
json_values = st.recursive(
    st.none() | st.booleans() | floats | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def plans(draw: st.DrawFn) -> Planned:
    made = tuple(draw(st.lists(changes, max_size=2)))
    believed = tuple(draw(floats) for _ in made)
    guessed = tuple(change.job for change in made if draw(st.booleans()))
    return Planned(draw(texts), made, believed, draw(st.none() | floats), draw(json_values), guessed)


records = st.builds(Record, floats, st.lists(facts, max_size=3), st.none() | plans(), st.lists(facts, max_size=1))
HEADER = Header("1.2.3", "fifo:bypass=true", Cluster.build([(2, 4, "V100")]), 7)


def written(kept: list[Record], header: Header = HEADER) -> str:
    stream = io.StringIO()
    writer = JournalWriter(stream, header)
    for record in kept:
        writer.record(record)
    return stream.getvalue()


def test_every_fact_is_known() -> None:
    kinds = {JobSubmitted, JobCancelled, JobPaused, JobResumed, AssignApplied, ReleaseApplied, ProgressReported}
    kinds |= {JobFinished, JobFailed, JobCrashed, NodeJoined, NodeLost, Woke}
    kinds |= {
        WeightChanged,
        LimitsChanged,
        ResumabilityChanged,
        PolicyChanged,
        OutsidersSeen,
        DeadlineMissed,
        LinkMeasured,
    }
    assert {kind.__name__ for kind in Fact.__subclasses__()} == {kind.__name__ for kind in kinds}
    assert {journal._FACTS[kind.__name__] for kind in kinds} == kinds


@settings(max_examples=150)
@given(st.lists(records, max_size=3))
def test_there_and_back(kept: list[Record]) -> None:
    text = written(kept)
    text.encode("utf-8")  # what goes to a file must be encodable
    header, read = read_journal(text.splitlines())
    back = list(read)
    assert header == HEADER
    assert [tuple(record) for record in back] == [tuple(record) for record in kept]
    assert [record.ignored for record in back] == [list(record.ignored) for record in kept]
    assert written(back) == text


@given(mixed_clusters(), st.sampled_from((None, "odd")))
def test_headers_there_and_back(cluster: Cluster, name: str | None) -> None:
    nodes = list(cluster.nodes)
    if name:
        nodes[-1] = Node(nodes[-1].id, name, nodes[-1].banks)
    linked = Cluster(tuple(nodes), (Link(("node:a", "rack:1"), 1e9, 0.001),))
    header, _ = read_journal(written([], Header("0", "x", linked)).splitlines())
    assert header.cluster == linked


def test_like_nodes_are_written_once() -> None:
    cluster = Cluster.build([(64, 8, "V100")])
    line = json.loads(written([], Header("0", "x", cluster)))
    assert line["cluster"] == [{"nodes": 64, "name": "n0", "banks": [["V100", 8, 0]]}]
    assert line["schema"] == 1


def test_large_allocations_are_ranges() -> None:
    planned = Planned("x", (Change(JobId("a"), Allocation.exclusive((range(10_000),))),), (1.0,))
    assert len(written([Record(0.0, (), planned)])) < 400


GOOD = written([Record(float(at), [JobCancelled(JobId("a"))]) for at in range(3)]).splitlines()


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        (3, GOOD[2][:-5], "journal line 3 is not JSON"),
        (2, "", "journal line 2 is not JSON"),
        (4, "[1, 2]", "journal line 4 is list, not an object"),
        (2, "{}", "journal line 2 is invalid: KeyError: 'at'"),
        (
            3,
            '{"at": 1, "facts": [{"fact": "JobVanished"}]}',
            "journal line 3 is invalid: KeyError: 'JobV",
        ),
        (
            3,
            '{"at": 1, "facts": [{"fact": "JobCancelled"}]}',
            "journal line 3 is invalid: InvalidField: JobCancelled.job",
        ),
        (3, '{"at": 1, "facts": 5}', "journal line 3 is invalid: TypeError"),
        (3, '{"at": 1, "facts": [], "planned": {}}', "journal line 3 is invalid: KeyError: 'changes'"),
        (1, "", "journal line 1 is not JSON"),
        (1, '{"schema": 2}', "journal line 1: schema 2 is not supported"),
        (1, "{}", "journal line 1: schema None is not supported"),
        (1, '{"schema": 1}', "journal line 1 is invalid: KeyError: 'cluster'"),
        (1, '{"schema": 1, "cluster": [{"nodes": 1, "name": "a", "banks": []}]}', "journal line 1 is invalid"),
    ],
)
def test_damage_is_named_by_its_line(line: int, text: str, words: str) -> None:
    lines = [*GOOD[: line - 1], text, *GOOD[line:]]
    with pytest.raises(JournalError) as refused:
        list(read_journal(lines)[1])
    assert str(refused.value).startswith(words)


def test_records_are_read_as_they_are_asked_for() -> None:
    def lines() -> Iterator[str]:
        yield from GOOD[:2]
        raise AssertionError("read ahead")

    _, read = read_journal(lines())
    assert next(iter(read)).at == 0.0


def test_an_empty_journal_is_damaged() -> None:
    with pytest.raises(JournalError, match="journal line 1 is not JSON"):
        read_journal([])


def test_memory_of_banks_is_kept() -> None:
    cluster = Cluster((Node(NodeId(0), "a", (Bank(Kind("V100"), range(2), 1 << 34),)),))
    assert read_journal(written([], Header("0", "x", cluster)).splitlines())[0].cluster == cluster


def test_supplies_of_nodes_are_kept_and_old_headers_have_none() -> None:
    plain = Cluster.build([(3, 2, "V100")])
    nodes = tuple(replace(node, resources=HostResources(8, 1 << 30)) if node.id else node for node in plain.nodes)
    written = journal.header_to_json(Header("1", "fifo", Cluster(nodes)))
    assert [group["nodes"] for group in written["cluster"]] == [1, 2]
    assert journal.header_from_json(json.loads(json.dumps(written))).cluster == Cluster(nodes)
    assert "supplies" not in written["cluster"][0]
