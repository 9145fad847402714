"""HTTP client of one server's control routes. Used by `link` and `verify`; every call has a deadline of its caller.

The token travels in a header only. Proxies from the environment are ignored: servers are on this machine or cluster.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import aiohttp

from pipelinerl.errors import WeightSyncError

if TYPE_CHECKING:  # the actor uses this client too, and has no need of torch
    from pipelinerl.weights.packing import TensorMeta

KVCache = Literal["keep", "recompute"]
_QUOTE_CHARACTERS = 800
_HEALTH_RETRY_S = 0.25


class ControlClient:
    """Control calls to the server at `url`, which messages call `name`. A WeightSyncError quotes a bad answer."""

    def __init__(self, session: aiohttp.ClientSession, name: str, url: str) -> None:
        self._session = session
        self.name = name
        self._url = url.rstrip("/")

    async def wait_healthy(self) -> None:
        """Return once the server answers `/health`. The caller bounds it in time; there is no event to wait for."""
        while True:
            try:
                async with self._session.get(f"{self._url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # not listening yet
            await asyncio.sleep(_HEALTH_RETRY_S)

    async def pause(self, kv_cache: KVCache) -> None:
        """Freeze running requests. `keep` keeps their KV cache, `recompute` makes them start their prefix over."""
        # vLLM's documentation says otherwise, but with mode=keep it is clear_cache that decides about the KV cache.
        await self._post("/pause", params={"mode": "keep", "clear_cache": "false" if kv_cache == "keep" else "true"})

    async def resume(self) -> None:
        await self._post("/resume")

    async def sleep(self, level: int) -> None:
        """Leave the GPU: level 1 keeps the weights in host memory, 2 drops them; 0 only pauses. No request may run."""
        if level == 0:
            # Nothing is left to do for a server without a GPU.
            await self.pause("keep")
        else:
            await self._post("/sleep", params={"level": str(level), "mode": "keep"})

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take back a part of what `sleep` gave away. The server samples when it has both."""
        await self._post("/wake_up", params={"tags": part})

    async def world_size(self) -> int:
        """Number of workers of the server."""
        answer = await self._request("GET", "/get_world_size")
        return int(answer["world_size"])

    async def model_info(self) -> dict[str, Any]:
        """`tensors` {name: shape} or None, `tied`, `dtype` of the server's model."""
        answer = await self._post("/collective_rpc", json={"method": "pipelinerl_model_info"})
        info = answer["results"][0]
        if not isinstance(info, dict):
            raise WeightSyncError(self.name, f"model info: got {info!r}, expected an object")
        return info

    async def abort_update(self) -> None:
        """Make the workers forget an update that was cut short and leave their transfer group."""
        await self._post("/collective_rpc", json={"method": "pipelinerl_abort_update"})

    async def init_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join the trainer's group. Returns when they have."""
        await self._post("/init_weight_transfer_engine", json={"init_info": init_info})

    async def start_update(self) -> None:
        await self._post("/start_weight_update")

    async def receive_update(self, metas: list[TensorMeta], pass_id: int) -> None:
        """Let the workers receive the tensors of pass `pass_id`. Returns when they have all of them."""
        await self._post("/update_weights", json={"update_info": update_info_of(metas, pass_id)})

    async def finish_update(self, version: int) -> None:
        """Put the weights in place under the label `version`."""
        await self._post("/finish_weight_update", json={"weight_version": str(version)})

    async def whole_update(
        self, metas: list[TensorMeta], pass_id: int, version: int, kv_cache: KVCache, wakes: bool, limit_s: float
    ) -> dict[str, float]:
        """Pause, receive, load and resume in one call (see `inference.update_route`); returns the seconds by phase.

        Args:
            metas: what is to come.
            pass_id: number of the pass, which the seals of its buffers contain.
            version: label of the new weights.
            kv_cache: what happens to the cache of running requests.
            wakes: the server sleeps and wakes on the way.
            limit_s: after so long the server leaves itself paused.
        """
        body = {
            "update_info": update_info_of(metas, pass_id),
            "weight_version": str(version),
            "clear_cache": kv_cache == "recompute",
            "wakes": wakes,
            "limit_s": limit_s,
        }
        answer = await self._post("/pipelinerl/update", json=body)
        return {str(phase): float(seconds) for phase, seconds in answer["seconds"].items()}

    async def weight_version(self) -> str:
        answer = await self._request("GET", "/weight_info")
        return str(answer["weight_version"])

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """One token-in-token-out request."""
        return await self._post("/inference/v1/generate", json=body)

    async def _post(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return await self._request("POST", path, **kwargs)

    async def _request(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            async with self._session.request(method, f"{self._url}{path}", **kwargs) as response:
                text = await response.text()
                if response.status != 200:
                    quoted = text[:_QUOTE_CHARACTERS]
                    raise WeightSyncError(self.name, f"{path} answered {response.status}: {quoted}")
                answer = await response.json() if text else {}
        except aiohttp.ClientError as error:
            raise WeightSyncError(self.name, f"{path} failed: {type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise WeightSyncError(self.name, f"{path}: got {str(answer)[:_QUOTE_CHARACTERS]!r}, expected a JSON object")
        return answer


def update_info_of(metas: list[TensorMeta], pass_id: int) -> dict[str, Any]:
    """What a worker is told about the tensors that are to come, and the number by which it knows their buffers."""
    return {
        "names": [meta.name for meta in metas],
        "dtype_names": [meta.dtype_name for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
        "pass_id": pass_id,
    }


def control_session(token: str) -> aiohttp.ClientSession:
    """A session for control calls: token in the header, no proxy, no time-out of its own (callers set deadlines)."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=None, connect=30),
        trust_env=False,
        # A connection per call: the server closes idle ones after 5 s and those of failed calls at once, and a call
        # that meets a connection which is just being closed fails although nothing is wrong.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )
