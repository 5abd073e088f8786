"""A job on two nodes, run as in the Kubernetes manifests, under one fault after the other."""

from __future__ import annotations

import os

from benchmarks.result import Result
from tests.cluster.proof.cluster import RANKS, WORLD, cluster, why_not
from tests.cluster.proof.story import KERNELS, SECONDS_EACH, job_with_faults
from tests.support.sandbox import sandboxed


def run() -> Result:
    reason = why_not()
    if reason:
        raise SystemExit(f"benchmark cluster_proof: {reason}")
    result = Result("A job on two nodes that suffers every fault", ["at s", "what", "what came of it"])
    with sandboxed() as sandbox, cluster(sandbox) as nodes:
        story = job_with_faults(nodes)
    result.rows = story.rows()
    result.notes = [
        f"one run; {WORLD} ranks, {RANKS} on each node, all need {KERNELS} kernels of {SECONDS_EACH:g} s, each rank begins with "
        "another one; so eight compiles are under way at a time",
        "seconds since the ranks' processes were started",
        "agents and Redis have the commands, arguments, settings and ACL file of k8s/ (lease TTL 15 s); nodes are network, mount "
        "and process namespaces of one machine, the store is a directory of it",
        "a wait holds the rank's own compile, if it came to that",
        f"load average of the machine at the end: {os.getloadavg()[1]:.1f} (5 minutes)",
    ]
    return result
