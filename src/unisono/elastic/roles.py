# SPDX-License-Identifier: Apache-2.0
"""Who computes and who serves, when a run has parameter servers. Pure; called by the quorum for every generation.

Any member can serve: it runs the same script and has the same model. So a lost server is replaced at once by somebody
who is here, as long as enough are left to compute. Hosts may wish for servers; apart from that, who serves goes on
serving. How many there should be is the operator's to say, while the run trains; a host that joins may bring some.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.elastic.roster import FIXED, Current, Roster, Worker


def servers_among(count: int, least: int, workers: int, servers: int) -> int:
    """How many of `count` members serve: as many as asked for, or fewer where many are missing. None: everybody does
    both. `least` compute before anybody serves."""
    whole = workers + servers
    fair = servers if count >= whole else max(min(1, servers), count * servers // whole)
    return max(0, min(fair, count - max(1, least)))


def servers_of(roster: Roster, count: int) -> int:
    """How many serve when so many take part."""
    return servers_among(count, roster.rules.min, roster.may_compute, roster.servers)


def are_settled(roster: Roster) -> bool:
    """Whether as many serve as would if the same members met again."""
    count = len(roster.current.members)
    computing = min(count - servers_of(roster, count), roster.microbatches)  # for the others nothing is left
    return len(roster.current.servers) == count - computing


def assigned(
    members: Sequence[Worker], before: Current, count: int, wishes: Mapping[str, int] | None = None
) -> tuple[list[Worker], list[Worker]]:
    """The workers and the servers of the next generation, `count` of them, each in the order of `members`. `wishes`: by
    host, the first one first, how many should be there."""
    served = [worker for worker in members if worker.number in before.servers]
    others = [worker for worker in reversed(members) if worker not in served]  # the newest first
    ranked = served + others
    wished = [
        worker
        for host, number in (wishes or {}).items()
        for worker in [one for one in ranked if one.host == host][:number]
    ]
    rest = [worker for worker in ranked if worker not in wished]
    chosen = {worker.number for worker in (wished + rest)[:count]}
    return (
        [worker for worker in members if worker.number not in chosen],
        [worker for worker in members if worker.number in chosen],
    )


def why_not(roster: Roster, servers: int) -> str:
    """Why there cannot be so many servers, and what to do about it; empty if there can."""
    asked, copies = f"{servers} server{'s' if servers != 1 else ''}", roster.rules.copies
    if not copies:
        return f"{asked}: this run has no slices for servers; start it with --strategy ps --servers {max(1, servers)}"
    if roster.is_fixed:
        return f"{asked}: this run is {roster.facts[FIXED]}, so its servers stay those it began with; start it anew"
    if copies > (servers if servers > 0 else roster.rules.min):  # without servers, workers hold them
        return (
            f"{asked}: this run keeps {copies} copies of each slice, each on another server (--copies {copies}); "
            f"ask for {copies} or more, or start it with fewer copies"
        )
    return "" if servers >= 0 else f"{asked}: there can be 0 (whoever computes serves, too) or more"


def brought(roster: Roster, host: str, servers: int) -> int:
    """How many servers more the run has from now on, when a host comes with so many. Those that the run has already
    move there, as far as they are not with other hosts and a place is free for who takes them over."""
    more = max(_beyond(roster, host, servers), len(roster.living) + servers - roster.wanted)
    more = max(0, min(more, servers))
    return 0 if why_not(roster, roster.servers + more) else more


def why_not_bring(roster: Roster, host: str, servers: int) -> str:
    """Why a host cannot come with so many servers; empty if it can."""
    beyond = _beyond(roster, host, servers)
    return why_not(roster, roster.servers + beyond) if beyond > 0 else ""


def _beyond(roster: Roster, host: str, servers: int) -> int:
    """By how many this host's would be more than the run's servers that are not with other hosts."""
    others = [other for other in roster.hosts.values() if other.id not in (host, roster.owner)]
    return sum(other.servers for other in others if not (other.away or other.leaving)) + servers - roster.servers
