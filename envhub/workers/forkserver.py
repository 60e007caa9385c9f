"""The process that imports a domain's environment once and forks its workers.

``envhub.workers.worker_pool`` starts it.
"""

from __future__ import annotations

import socket
import sys
from functools import partial

from broker.errors import UserError
from broker.settings.config import DomainSection
from envhub.domain import Domain, load_domain
from envhub.workers import protocol, worker
from rlearner_workers.forkserver import Forkserver, RequestRefused, send_report
from rlearner_workers.frames import read_frame
from rlearner_workers.limits import ResourceLimits


def load_setup(setup: protocol.SetupDomain) -> Domain:
    """Return the domain, its class imported, its arguments and data files checked and read."""
    domain = load_domain(setup.name, DomainSection.model_validate(setup.section))
    domain.check()
    return domain


def serve_worker(
    setup: protocol.SetupDomain,
    domain: Domain | None,
    connection: socket.socket,
    allowance: ResourceLimits,
) -> None:
    """In a worker: serve the domain's environment; load it, unless the forkserver did."""
    worker.serve(domain or load_setup(setup), connection, allowance)


def main(control: socket.socket) -> None:
    """Serve the hub at the other end of ``control``."""
    data = read_frame(control.fileno())
    if data is None:
        return
    setup = protocol.SETUPS.decode(data)
    try:
        domain = load_setup(setup) if setup.preload else None
    except UserError as error:
        send_report(control, RequestRefused(str(error)))
        return
    Forkserver(control, partial(serve_worker, setup, domain), setup.memory_mib).run()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
