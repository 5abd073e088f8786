"""``python -m benchmarks [--save] [--label LABEL] [NAME …]``: run the named benchmarks."""

from __future__ import annotations

import argparse
import sys

from benchmarks import (
    beside_stock,
    claims,
    cluster_proof,
    cold_start,
    compile_workers,
    compilers,
    cpu_only,
    first_step,
    footprint,
    lease_herd,
    lease_script,
    liger,
    linear_attention,
    live_key,
    many_artifacts,
    packs,
    rivals,
    scrapes,
    stale_rows,
    takeover,
    torch_compile,
    warm_hit,
    warm_job,
    way,
)
from benchmarks.cluster import rig, scale
from benchmarks.cluster import table as cluster
from benchmarks.result import Result

_ALL = {
    "takeover": takeover.run,
    "warm_hit": warm_hit.run,
    "warm_job": warm_job.run,
    "live_key": live_key.run,
    "cold_start": cold_start.run,
    "footprint": footprint.run,
}
_ON_GPUS = {"liger": liger.run, "linear_attention": linear_attention.run, "rivals": rivals.run}
_ON_REQUEST = {
    **_ON_GPUS,
    "cluster": cluster.run,  # takes minutes
    "cluster_nfs": scale.run,  # an hour, unless --nodes, --keys and --ways say less
    "cluster_nfs-rig": rig.run,  # half an hour, and NFS_RIG: see tests/nfs/README.md
    "compile_workers": compile_workers.run,
    "compilers": compilers.run,  # minutes
    "stale_rows": stale_rows.run,  # so does this
    "cpu_only": cpu_only.run,  # and this
    "first_step": first_step.run,  # and this
    "many_artifacts": many_artifacts.run,  # and this, and 300,000 files below the temporary directory
    "beside_stock": beside_stock.run,  # takes minutes
    "claims": claims.run,
    "way": way.run,
    "packs": packs.run,
    "scrapes": scrapes.run,
    "lease_script": lease_script.run,
    "lease_herd": lease_herd.run,
    "torch_compile": torch_compile.run,  # takes minutes
    "cluster_proof": cluster_proof.run,  # needs root, kubectl and network namespaces
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(_ALL | _ON_REQUEST)}; default: the first {len(_ALL)}"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME.md too")
    parser.add_argument("--label", default="", help="what the result's name ends with, for a second machine")
    parser.add_argument(
        "--nodes",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="of cluster, cluster_nfs, cluster_nfs-rig and lease_herd",
    )
    parser.add_argument(
        "--keys", type=int, nargs="+", default=[], metavar="N", help="of cluster_nfs, and of its rig: 300, 3000"
    )
    parser.add_argument(
        "--ways", nargs="+", default=[], choices=scale.WAYS, help="of cluster_nfs and cluster_nfs-rig; default: all"
    )
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="N", help=f"of {', '.join(_ON_GPUS)}; default: one a GPU"
    )
    parser.add_argument("--dilation", type=float, default=1.0, metavar="FACTOR", help="of lease_herd; default: 1")
    parser.add_argument("--agents-per-process", type=int, default=1, metavar="N", help="of cluster; default: 1")
    args = parser.parse_args()
    known = _ALL | _ON_REQUEST
    unknown = [n for n in args.names if n not in known]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: name some of {', '.join(known)}")
    if args.ranks < 0:
        parser.error("--ranks: it must be at least 1")
    if args.agents_per_process < 1:
        parser.error("--agents-per-process: it must be at least 1")
    if any(count < 1 for count in args.nodes):
        parser.error("--nodes: each must be at least 1")
    for name in args.names or _ALL:
        how = [args.ranks] if name in _ON_GPUS else []
        if name == "cluster":
            how = [args.nodes, args.agents_per_process]
        elif name in ("cluster_nfs", "cluster_nfs-rig"):
            how = [args.nodes, args.keys, args.ways]
        elif name == "lease_herd":
            how = [args.nodes, args.ranks or 1, args.dilation]
        result: Result = known[name](*how)
        print(result.text(), flush=True)
        if args.save:
            result.save(name + (f"-{args.label}" if args.label else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
