# SPDX-License-Identifier: Apache-2.0
"""What another machine's workers said reaches the owner in order, none lost and none twice, whatever the wire does."""

from __future__ import annotations

import random

import pytest

from unisono.control.link import Door, Link
from unisono.control.outbox import AGAIN_S, Intake, Outbox
from unisono.wire import messages as m


class BadWire(Link):
    """A link whose connections come and go, with an owner at the other end who is not always there."""

    def __init__(self, outages: random.Random) -> None:
        super().__init__(Door(), lambda: m.Hello(role="host", host="b"), lambda: None)
        self.outages, self.intake = outages, Intake()
        self.taken: list[str] = []
        self.receipts: list[m.Acknowledge] = []
        self.connected = self.owner_there = True
        self.connections, self.now_s = 1, 0.0

    def send(self, message: m.Message) -> None:
        assert isinstance(message, m.Relay)
        if not self.connected or not self.owner_there:
            return
        if self.intake.takes(message):
            self.taken.append(message.output)
        if self.outages.random() < 0.8:  # else the receipt is lost
            self.receipts.append(self.intake.receipt(message.host))

    def change(self) -> None:
        self.owner_there = self.outages.random() < 0.6
        if not self.connected:
            self.connected, self.connections = True, self.connections + 1
        elif self.outages.random() < 0.3:
            self.connected = False


@pytest.mark.parametrize("seed", range(200))
def test_everything_arrives_once_and_in_order(seed: int) -> None:
    wire = BadWire(random.Random(seed))
    outbox = Outbox("b", wire, lambda: wire.now_s)
    for number in range(60):
        wire.change()
        if wire.outages.random() < 0.7:
            outbox.push()
        outbox.put(output=str(number))
        if wire.connected:
            for receipt in wire.receipts:
                outbox.acknowledged(receipt.number)
        wire.receipts.clear()
        wire.now_s += wire.outages.random() * AGAIN_S
    wire.connected = wire.owner_there = True
    while not outbox.is_empty:  # as long as it takes
        wire.now_s += AGAIN_S
        outbox.push()
        for receipt in wire.receipts:
            outbox.acknowledged(receipt.number)
    assert wire.taken == [str(number) for number in range(60)]


def test_hosts_are_counted_apart() -> None:
    intake = Intake()
    assert intake.takes(m.Relay(host="b", number=1))
    assert intake.takes(m.Relay(host="c", number=1))
    assert not intake.takes(m.Relay(host="b", number=1)), "known already"
    assert not intake.takes(m.Relay(host="b", number=3)), "it has overtaken number 2"
    assert intake.receipt("b").number == 1
    assert intake.receipt("nobody").number == 0
