# SPDX-License-Identifier: Apache-2.0
"""The journal's view of the roster: what must survive the coordinator's death, as plain values for JSON.

The rest, hosts tell again when they connect: what their workers said last, and who has died. Torch-free.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from unisono.core.errors import InternalError
from unisono.elastic.restarts import Death
from unisono.elastic.roster import Current, Host, Roster, Rules, Vacancy, Worker
from unisono.elastic.turns import Turns

_TOLD_AGAIN = ("status", "status_s", "stopped")  # of a worker
_CONNECTION = ("heard_s", "away", "disconnected_s")  # of a host
_PLAIN = (
    "target",
    "servers",
    "owner",
    "facts",
    "facts_of",
    "restarts",
    "under_way",
    "closing",
    "stop_because",
    "end",
    "held",
    "enough_since_s",
    "short_since_s",
)


def durable(roster: Roster) -> dict[str, Any]:
    current = asdict(roster.current)
    del current["published_s"]
    return {name: getattr(roster, name) for name in _PLAIN} | {
        "current": current,
        "deaths": [asdict(death) for death in roster.deaths],
        "vacancies": [asdict(vacancy) for vacancy in roster.vacancies],
        "workers": [_without(worker, _TOLD_AGAIN) for worker in roster.workers.values()],
        "hosts": [_without(host, _CONNECTION) for host in roster.hosts.values()],
        "turns": {name: [list(pair) for pair in getattr(roster.turns, name).items()] for name in ("done", "inside")},
    }


def restored(data: dict[str, Any], rules: Rules, now_s: float) -> Roster:
    """The roster as it was. Its hosts have as long to be heard again as if they had just spoken."""
    try:
        return Roster(
            rules,
            **{name: data[name] for name in _PLAIN},
            current=Current(**data["current"], published_s=now_s),
            deaths=[Death(**row) for row in data["deaths"]],
            vacancies=[Vacancy(**row) for row in data["vacancies"]],
            workers={row["number"]: Worker(**row) for row in data["workers"]},
            hosts={row["id"]: Host(**row, heard_s=now_s) for row in data["hosts"]},
            turns=Turns(dict(data["turns"]["done"]), inside=dict(data["turns"]["inside"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InternalError(f"the coordinator's journal cannot be read: {error}") from None


def _without(record: Worker | Host, names: tuple[str, ...]) -> dict[str, Any]:
    """Of the rest, what is not as it is at first: a long run has many workers that are gone."""
    rest = [item for item in fields(record) if item.name not in names]
    return {item.name: value for item in rest if (value := getattr(record, item.name)) != item.default}
