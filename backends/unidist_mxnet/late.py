"""The meeting of workers whose scheduler is MXNet's own: after ps-lite has brought them together, through its store.

Such a scheduler hosts nothing. ps-lite's first worker does it instead, and its card goes to the others as numbers.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

from unidist.plugin import Control, Host, Meeting, World, bind, facts, network, url
from unidist_mxnet import MxnetOptions, plugin
from unidist_mxnet.store import Store


def meet_by_store(world: World, options: MxnetOptions, store: Store, timeout: float) -> World:
    host, card = None, b""
    if store.rank == 0:
        address, secret = network.address_towards(world.master_addr or "127.0.0.1"), os.urandom(16).hex()
        listener = bind(address, 0)
        card = json.dumps([url(address, listener.getsockname()[1]), secret]).encode()
        host = Host([listener], secret, "", 1, False)
    control = Control(*json.loads(store.tell_all(card)))
    # The launcher's own number, where there is one, is the one that users know.
    world = replace(world, rank=world.rank if world.rank >= 0 else store.rank)
    met = Meeting(world, facts(plugin, options), timeout, control=control).complete()
    assert met.peers is not None
    return replace(met, master_addr=world.master_addr, peers=replace(met.peers, host=host))
