"""`python -m pipelinerl.actor.worker_main ...`: one rollout worker. Started by the actor, never by hand.

Imports the user's rollout function, loads the tokenizer, then serves the actor over the socket that it inherited.
Ends when the actor closes it. A fault of its own goes to stderr as a traceback, exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import logging
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl.errors import EXIT_USER_ERROR, DomainError, UserError

if TYPE_CHECKING:
    from pipelinerl.config import RunConfig
    from pipelinerl.llm import TrainableLLM

_MODEL_NAME = "actor"
# Objects made before the collector looks at the young ones (default 700), and rounds before it looks at older ones.
_GC_THRESHOLDS = (20_000, 20, 20)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the actor and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--job", required=True)
    parser.add_argument("--index", required=True, type=int)
    parser.add_argument("--fd", required=True, type=int, help="inherited socket to the actor")
    parser.add_argument("--block-limit-s", required=True, type=float, help="user code may hold the event loop so long")
    arguments = parser.parse_args(argv)

    import uvloop

    from pipelinerl.actor.worker_messages import CRASHED_EXIT_CODE, STACKS_SIGNAL
    from pipelinerl.role import LOG_FORMAT, end_with_launcher

    name = f"{arguments.job}/worker_{arguments.index}"
    logging.basicConfig(
        level=logging.INFO, format=LOG_FORMAT.replace("%(name)s", f"{name} %(name)s"), stream=sys.stderr
    )
    end_with_launcher()
    # `chain`: then the signal does what it does by itself, it ends the process.
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True, chain=True)
    # What is loaded by now stays; rollouts make many small objects that no cycle holds.
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    connection = socket.socket(fileno=arguments.fd)
    connection.setblocking(False)
    try:
        uvloop.run(_serve(arguments.run_dir, connection, arguments.block_limit_s))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except Exception:  # noqa: BLE001 - the last stop of this process: the whole traceback goes to the log
        traceback.print_exc()
        return CRASHED_EXIT_CODE
    return 0


async def _serve(root: Path, connection: socket.socket, block_limit_s: float) -> None:
    from pipelinerl.actor.worker import RolloutWorker
    from pipelinerl.actor.worker_messages import Connection, Fatal
    from pipelinerl.config.load import load_config, to_dictconfig
    from pipelinerl.domains.registry import load_rollout_function
    from pipelinerl.llm.tokens import load_tokenizer
    from pipelinerl.role import TOKEN_KEY
    from pipelinerl.rundir.identity import read_identity
    from pipelinerl.rundir.layout import RunDir
    from pipelinerl.sandbox.services import open_environments, open_verifier
    from pipelinerl.world import WorldMap

    reader, writer = await asyncio.open_unix_connection(sock=connection)
    files = RunDir(root)
    try:
        config = load_config(files.config_file)
        function = load_rollout_function(config)
    except DomainError as error:
        connection_to_actor: Connection[None] = Connection(reader, writer, Fatal)
        connection_to_actor.send(Fatal(user_error=True, message=str(error)))
        await connection_to_actor.flush()
        raise
    world = WorldMap.from_json(files.world_file.read_bytes())
    plan_urls = [job.url for job in world.jobs_of("actor_llm") if job.url is not None]
    tokenizer = load_tokenizer(config.model_path, trust_remote_code=config.finetune.trust_remote_code)
    worker = RolloutWorker(
        function=function,
        cfg=to_dictconfig(config),
        training_llms=make_llms(config, plan_urls, tokenizer, evaluation=False),
        evaluation_llms=make_llms(config, plan_urls, tokenizer, evaluation=True),
        incarnation=read_identity(files.identity_file).incarnation,
        reader=reader,
        writer=writer,
        block_limit_s=block_limit_s,
        make_llms=lambda url: (
            make_llms(config, [url], tokenizer, evaluation=False)[0],
            make_llms(config, [url], tokenizer, evaluation=True)[0],
        ),
    )
    token = os.environ.get(TOKEN_KEY, "")
    urls = {kind: [job.url for job in world.jobs_of(kind) if job.url] for kind in ("verifier", "environment")}
    async with open_verifier(config.verifier, urls["verifier"], token), open_environments(urls["environment"], token):
        await worker.run()


def make_llms(config: RunConfig, urls: Sequence[str], tokenizer: Any, *, evaluation: bool) -> list[TrainableLLM]:
    """Return one handle per server. Evaluations do not train, so they ask for no log-probs, which cost the server."""
    from pipelinerl.llm import TrainableLLM
    from pipelinerl.llm.trainable import sampling_parameters
    from pipelinerl.role import TOKEN_KEY

    section = config.test_llm if evaluation else config.llm
    llms = [
        TrainableLLM(
            base_url=url,
            model_name=_MODEL_NAME,
            tokenizer=tokenizer,
            parameters=sampling_parameters(section.parameters),
            token=os.environ.get(TOKEN_KEY, ""),
            collect_logprobs=not evaluation,
            request_timeout_s=config.actor.request_timeout_s,
            max_retries=config.actor.max_retries,
            # Without a trainer nobody labels the weights: they are the model's own.
            unlabelled_version=0 if config.debug.mode == "actor" else None,
        )
        for url in urls
    ]
    # One renderer for all: its cache serves every server.
    for llm in llms[1:]:
        llm.share_renderer(llms[0])
    return llms


if __name__ == "__main__":
    sys.exit(main())
