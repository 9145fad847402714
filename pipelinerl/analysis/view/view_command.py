"""The command `view`: serve the page on this machine, or export it into one file."""

from __future__ import annotations

import argparse
import secrets
import socket
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import uvicorn

from pipelinerl.analysis.view.export import MAX_BYTES, write_export
from pipelinerl.analysis.view.view_app import LOCAL_HOSTS, make_app
from pipelinerl.analysis.view.watched_run import WatchedRun
from pipelinerl.commands import typed
from pipelinerl.errors import EXIT_RUN_FAILED, ConfigError, StreamError
from pipelinerl.tracking.token_text import one_line

_LOOPBACK = "127.0.0.1"
_LOOPBACK_HOSTS = (_LOOPBACK, "::1", "localhost")


def main(argv: list[str]) -> int:
    """Serve the runs that `argv` names until Ctrl-C, or export them; return the exit code."""
    args = _parser().parse_args(argv)
    # As in an address: [::1].
    host = args.host.removeprefix("[").removesuffix("]")
    try:
        with ExitStack() as stack:
            runs = [stack.enter_context(closing(WatchedRun(folder))) for folder in args.run_dir]
            if args.export is None:
                _serve([run.start() for run in runs], host, args.port)
            else:
                size = write_export(runs, Path(args.export))
                print(f"{one_line(args.export)}: {size / 1e6:.1f} MB")
        return 0
    except StreamError as error:
        print(error, file=sys.stderr)
        return EXIT_RUN_FAILED


def names_of(host: str) -> set[str]:
    """Host names that browsers may use for a server at `host`: those of this machine if others can reach it."""
    names = {host.lower(), socket.gethostname().lower()}
    if host not in _LOOPBACK_HOSTS:
        # Asks a name server, which is slow where there is none.
        names.add(socket.getfqdn().lower())
    short = {name.partition(".")[0] for name in names if name[:1].isalpha()}
    return names | short | {f"{name}.local" for name in short}


def _serve(runs: list[WatchedRun], host: str, port: int) -> None:
    with closing(_listen(host, port)) as listener:
        token = secrets.token_urlsafe(24)
        app = make_app(runs, token, LOCAL_HOSTS | names_of(host))
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{listener.getsockname()[1]}/?token={token}", flush=True)
        print("The page is live. Ctrl-C stops it without affecting the run.", flush=True)
        # No access log: the address of the first request has the token.
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        expected = f"a free address of this machine ({error})"
        raise ConfigError("--host and --port", f"{host}:{port}", expected, "Omit them.") from error
    if host not in _LOOPBACK_HOSTS:
        print(f"Other machines can reach {host}, and the traffic is not encrypted.", file=sys.stderr)
    return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed("view"),
        description="Show runs in the browser, during and after training: curves, processes, rollouts with their "
        "tokens, fates, and comparisons of several runs. Read-only, only for this machine, needs no network.",
        epilog="From another machine: `ssh -L 8765:127.0.0.1:8765 HOST`, with --port 8765 there. Exit code 0; 1: a "
        "stream is damaged, 2: not the directory of a run.",
    )
    parser.add_argument("run_dir", nargs="+", help="output_dir of a run; several are compared")
    parser.add_argument("--host", default=_LOOPBACK, help=f"address to listen on ({_LOOPBACK}: this machine only)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (0, the default: any free port)")
    parser.add_argument(
        "--export",
        metavar="FILE.html",
        help=f"write a self-contained page of at most {MAX_BYTES // 10**6} MB with selected rollouts, and exit",
    )
    return parser
