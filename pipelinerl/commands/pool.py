"""`python -m pipelinerl pool list|add|remove ...`: servers of a running run, from another terminal.

Called by `pipelinerl.__main__`. Waits for the launcher's answer and, with `add`, until the server takes rollouts.
"""

from __future__ import annotations

import argparse

_ANSWER_TIMEOUT_S = 60.0


def main(argv: list[str]) -> int:
    """List, add or remove servers; return 0."""
    args = _parser().parse_args(argv)
    # late: `--help` needs none of this
    from pipelinerl.errors import ConfigError
    from pipelinerl.run.open_run import find_run
    from pipelinerl.run.pool_requests import PoolRequest, ask, read_state, wait_serving

    run = find_run(args.run_dir)
    if args.action == "list":
        for server in read_state(run.run_dir):
            version = "-" if server.version is None else server.version
            trouble = f" ({server.trouble})" if server.trouble else ""
            print(f"{server.name}  {server.url}  {server.state}  version {version}  starts {server.starts}{trouble}")
        return 0
    if not run.is_running:
        raise ConfigError("run directory", str(run.run_dir.root), "a run that goes on now", "Start it first.")
    request = PoolRequest(args.action, args.server)
    name = ask(run.run_dir, request, _ANSWER_TIMEOUT_S)
    if args.action == "remove":
        print(f"{name} ({args.server}) takes no more rollouts and gets no more weights")
        return 0
    print(f"{name} ({args.server}) joins")
    state = wait_serving(run.run_dir, request, name, args.timeout)
    print(f"{name} serves with version {state.version}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipelinerl pool",
        description="Servers of a running run. `add` takes in a server that is up already, started with the run's "
        "token: start launcher and server with the same PIPELINERL_SERVER_TOKEN. It gets the weights between two "
        "updates, its log-probs are compared, then it takes rollouts. `remove` gives it no more rollouts; those that "
        "run there come to their end, or are run again elsewhere if the launcher started the server.",
        epilog="A server by hand: PIPELINERL_SERVER_TOKEN=... python -m pipelinerl.inference.main --model PATH "
        "--port N [--transport nccl]. Exit code 2: refused, with the reason.",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    show = actions.add_parser("list", help="all servers with their state")
    show.add_argument("run_dir", help="output_dir of the run")
    add = actions.add_parser("add", help="take in a server")
    add.add_argument("server", metavar="URL", help="http://HOST:PORT of a server")
    add.add_argument("run_dir", help="output_dir of the run")
    add.add_argument("--timeout", type=float, default=900.0, help="seconds to wait until it serves (900)")
    remove = actions.add_parser("remove", help="let a server go")
    remove.add_argument("server", metavar="URL", help="its URL or name")
    remove.add_argument("run_dir", help="output_dir of the run")
    return parser
