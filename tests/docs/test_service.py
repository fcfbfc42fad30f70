"""The service page and the Grafana dashboard match the API, metrics, verbs and settings."""

import asyncio
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.cli.main import VERBS
from carpool.core.errors import JournalError
from carpool.core.journal import Header
from carpool.core.messages import Record
from carpool.core.topology import Cluster
from carpool.service.admission import Quotas
from carpool.service.config import read_settings
from carpool.service.store.database import MIGRATIONS
from carpool.service.store.store import DATABASE, LOG, Store
from tests.support.http_rig import open_http

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "service.md").read_text(encoding="utf-8")


def get(folder: Path, path: str) -> str:
    """Response of a daemon to an admin's request."""

    async def fetch() -> str:
        async with open_http(folder) as http:
            await http["ada"].get("/v1/me")
            return (await http["root"].get(path)).text

    return asyncio.run(fetch())


def test_every_route_is_on_the_page(tmp_path: Path) -> None:
    paths = json.loads(get(tmp_path, "/v1/openapi.json"))["paths"]
    for path in paths:
        short = path.partition("{job}")[2] or "/" + path.rpartition("/")[2]
        named = re.sub(r"\{(job|array|node)\}", "NAME", path)
        assert named in PAGE or f"`{short}`" in PAGE, path


def test_every_metric_of_the_grafana_dashboard_exists(tmp_path: Path) -> None:
    metrics = get(tmp_path, "/metrics")
    text = (DOCS / "grafana.json").read_text(encoding="utf-8")
    panels = json.loads(text)["panels"]
    names = set(re.findall(r"\b((?:carpool|process)_\w+)", " ".join(t["expr"] for p in panels for t in p["targets"])))
    assert len(names) > 8
    assert [name for name in names if name not in metrics] == []


def test_the_error_for_a_newer_store_is_on_the_page(tmp_path: Path) -> None:
    header = Header("1", "fifo", Cluster.build([(1, 1, "cpu")]))
    with closing(Store.open(tmp_path, header)) as store:
        store.record(Record(1.0, ()))
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    (tmp_path / LOG).unlink()
    with pytest.raises(JournalError) as error:
        Store.open(tmp_path, header)
    page = (DOCS / "upgrading.md").read_text(encoding="utf-8")
    assert re.sub(r"\d+", "N", str(error.value)) in re.sub(r"\d+", "N", page)


def test_commands_and_settings_on_the_page_exist(tmp_path: Path) -> None:
    pages = PAGE + (DOCS / "upgrading.md").read_text(encoding="utf-8")
    verbs = set(re.findall(r"^\$ (?:docker exec carpool )?carpool (\w+)", pages, re.MULTILINE))
    assert {"submit", "restore", "token"} <= verbs <= set(VERBS)
    (tmp_path / "config.toml").write_text(PAGE.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    settings = read_settings({"HOME": str(tmp_path), "CARPOOL_CONFIG": str(tmp_path / "config.toml")})
    assert Quotas.read(settings.users, "users").of("ada").jobs == 500
