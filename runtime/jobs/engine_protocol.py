"""What a job needs of an engine. The job layer imports no torch: any object with these members will do."""

from typing import Any, Protocol

from dspark.runtime.spec.request import Request, RequestOutput


class EngineProtocol(Protocol):
    """Requests in, finished requests out."""

    max_model_len: int
    """Longest prompt and answer together, in tokens."""

    max_num_seqs: int
    """Most sequences in one step; the job keeps a few times as many requests waiting."""

    vocab_size: int
    """Token ids are below this."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it can never be served (prompt too long, more KV blocks than the pool has)."""

    def step(self) -> list[RequestOutput]:
        """Run one step and return the requests that it finished; [] when there is nothing to do."""

    @property
    def num_unfinished(self) -> int:
        """Requests added and not yet returned."""

    def metrics(self) -> dict[str, Any]:
        """Counters and choices of the run so far, JSON-ready (tokens, steps, KV use, preemptions, kernels, ...)."""

    def finish(self) -> list[str]:
        """A run is over, whole or stopped: keep what is for the next one. Returns what the user should know of it."""

    def close(self) -> None:
        """Give threads and memory back."""
