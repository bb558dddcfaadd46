"""The client: one engine's connection to the daemon of its node.

Every call and every wait has a deadline. All that goes wrong between engine and daemon
is one of three exceptions, and each means: compute it yourself.

  Refused  the daemon said no. Nothing has changed; the text says what to change.
  Gone     the stream of events has ended. Nothing will come any more.
  Late     a kind of Gone: a deadline passed. The daemon may be frozen and may wake up, so
           the blocks that were named in a job are not to be used again until the client
           is closed.
"""

import threading
import time
from dataclasses import dataclass, field

import grpc

from . import engine_pb2 as pb
from .keys import HASH_BYTES

# A Begin may do two lookups of 500 ms, and Finish waits for the jobs of its request.
CALL_TIMEOUT_S = 20.0
# A request may wait 30 s for its peer, and then its load needs room to end as a failure.
JOB_TIMEOUT_S = 45.0
# What a Begin that was given up takes to say so.
GIVE_UP_S = 0.25
# The reply to Begin may list every chunk of a long prompt.
MESSAGE_BYTES_MAX = 64 << 20

_SERVICE = "/tierd.engine.v1.Engine/"


class Refused(Exception):
    """The daemon's no to one call. code is a grpc.StatusCode."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Gone(Exception):
    """The daemon is gone, or the client was closed."""


class Late(Gone):
    """The daemon gave no answer in time."""


@dataclass
class Pull:
    """What became of a consumer's request. resume_tokens always holds: go on from it."""

    resume_tokens: int
    planned_tokens: int
    # Chunks that attention may now read in the blocks, and chunks that could not be had.
    loaded: list = field(default_factory=list)
    failures: list = field(default_factory=list)
    # What the plan demanded, before anything was known to come.
    demand: list = field(default_factory=list)
    # Why less was had than could have been; empty when all was well.
    reason: str = ""
    # The request is live: end it with finish.
    live: bool = False
    # The daemon may still write to the blocks of this request: leave them alone.
    late: bool = False


class Client:
    """Methods may be called from any thread. attach comes first, and once."""

    def __init__(self, socket, call_timeout=CALL_TIMEOUT_S, job_timeout=JOB_TIMEOUT_S):
        self.call_timeout, self.job_timeout = call_timeout, job_timeout
        # Without an authority of its own, gRPC would send the socket's path as one.
        self._channel = grpc.insecure_channel(
            "unix:" + socket,
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.default_authority", "localhost"),
            ],
        )
        self._calls = {
            name: self._channel.unary_unary(
                _SERVICE + name,
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
            for name, request, reply in (
                ("Attach", pb.AttachRequest, pb.AttachReply),
                ("Begin", pb.BeginRequest, pb.BeginReply),
                ("Store", pb.StoreRequest, pb.JobReply),
                ("Load", pb.LoadRequest, pb.JobReply),
                ("Finish", pb.FinishRequest, pb.FinishReply),
            )
        }
        self._news = threading.Condition()
        self._results = {}  # events that nobody has waited for yet, by job
        self._gone = None  # why, once the stream of events has ended
        self._stream = self._reader = None
        self.engine_id, self.attached = "", None

    def attach(self, name, regions=(), **more):
        """Registers the engine, opens the stream of events and returns the AttachReply.

        regions are pb.Region; more are the other fields of pb.AttachRequest.
        """
        if self.attached:
            raise RuntimeError("attached already; a client attaches once")
        reply = self._call("Attach", pb.AttachRequest(engine_name=name, regions=regions, **more))
        self.engine_id = reply.engine_id
        events = self._channel.unary_stream(
            _SERVICE + "Events",
            request_serializer=pb.EventsRequest.SerializeToString,
            response_deserializer=pb.Event.FromString,
        )
        self._stream = events(pb.EventsRequest(engine_id=self.engine_id))
        opened = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(opened,), daemon=True)
        self._reader.start()
        if not opened.wait(self.call_timeout):
            self.close()
            raise Late(f"the stream of events was not open after {self.call_timeout} s")
        if self._gone:
            raise self._ended()
        self.attached = reply
        return reply

    def _read(self, opened):
        why = "the daemon has ended the stream of events"
        try:
            self._stream.initial_metadata()  # sent once the daemon counts on the stream
            opened.set()
            for event in self._stream:
                with self._news:
                    self._results[event.job_id] = event
                    self._news.notify_all()
        except grpc.RpcError as err:
            why = f"the stream of events has ended: {err.details()}"
        with self._news:
            self._gone = self._gone or Gone(why)
            self._news.notify_all()
        opened.set()

    def _ended(self):
        # A new one each time: one that is raised again and again keeps the frames of every
        # time, with all that was in them.
        return type(self._gone)(*self._gone.args)

    @property
    def gone(self):
        """The Gone that ended the stream of events, or None while the daemon is there."""
        return self._gone

    def begin(self, **fields):
        """Opens a request and returns the BeginReply; fields are those of pb.BeginRequest."""
        fields.setdefault("hash_bytes", HASH_BYTES)
        request = pb.BeginRequest(engine_id=self.engine_id, **fields)
        try:
            return self._call("Begin", request)
        except Late:
            # Whether it is live is not known: end it, which is NOT_FOUND when it is not.
            self._try_finish(request.request_id, abort=True, timeout=GIVE_UP_S)
            raise

    def store(self, **fields):
        """Tells that a step of a producer has ended; returns the number of the job."""
        return self._call("Store", pb.StoreRequest(engine_id=self.engine_id, **fields)).job_id

    def load(self, **fields):
        """Brings what was fetched into the named blocks; returns the number of the job."""
        return self._call("Load", pb.LoadRequest(engine_id=self.engine_id, **fields)).job_id

    def finish(self, request_id, abort=False, computed_tokens=0):
        """Ends a request, after its last job, and returns the FinishReply."""
        request = pb.FinishRequest(
            engine_id=self.engine_id, request_id=request_id, abort=abort, computed_tokens=computed_tokens
        )
        return self._call("Finish", request)

    def wait(self, job, timeout=None):
        """The one Event of a job. Every job is waited for, once."""
        end = time.monotonic() + (self.job_timeout if timeout is None else timeout)
        with self._news:
            while job not in self._results:
                if self._gone:
                    raise self._ended()
                left = end - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    if job not in self._results and time.monotonic() >= end:
                        raise Late(f"job {job} had no result in time")
            return self._results.pop(job)

    def poll(self, job):
        """The Event of a job if it is there by now, or None: wait without waiting."""
        with self._news:
            if job not in self._results and self._gone:
                raise self._ended()
            return self._results.pop(job, None)

    def pull(self, destinations, ready=lambda: 0, **fields):
        """A consumer's begin and load in one, which never raises for the daemon's sake.

        fields are those of pb.BeginRequest. destinations is called with the plan's demand
        and fallback (lists of pb.GroupChunks) and returns the pb.BlockRuns to load into;
        it raises MemoryError when there is no room. ready is called behind it and returns
        LoadRequest.event: an event recorded behind the kernels that still use those blocks,
        or 0 when there are none. The answer says from which token to compute; without a
        daemon that is local_tokens.
        """
        local = fields.get("local_tokens", 0)
        out = Pull(local, local)
        try:
            plan = self.begin(role=pb.CONSUMER, **fields)
        except (Refused, Gone) as err:
            out.reason = f"begin: {err}"
            return out
        out.live, out.planned_tokens, out.reason = True, plan.resume_tokens, plan.note
        out.demand = list(plan.demand)
        if plan.resume_tokens <= local:
            return out
        try:
            runs = destinations(out.demand, list(plan.fallback))
            event = self.wait(self.load(request_id=fields["request_id"], blocks=runs, event=ready()))
        except (Refused, Gone, MemoryError) as err:
            out.reason, out.late = f"load: {err}", isinstance(err, Late)
            return out
        out.loaded, out.failures = list(event.loaded), list(event.failures)
        # Less than was there already, or more than was planned, is no answer.
        out.resume_tokens = min(max(event.resume_tokens, local), plan.resume_tokens)
        if out.resume_tokens < plan.resume_tokens:
            f = out.failures[0] if out.failures else None
            out.reason = event.error or (f"group {f.group} chunk {f.chunk}: {f.cause}: {f.detail}" if f else "")
        return out

    def _try_finish(self, request_id, abort, timeout):
        try:
            self._call(
                "Finish", pb.FinishRequest(engine_id=self.engine_id, request_id=request_id, abort=abort), timeout
            )
        except (Refused, Gone):
            pass  # the end of the stream of events ends it

    def _call(self, name, request, timeout=None):
        if self._gone:
            raise self._ended()
        limit = self.call_timeout if timeout is None else timeout
        try:
            return self._calls[name](request, timeout=limit)
        except grpc.RpcError as err:
            code, text = err.code(), err.details()
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise Late(f"{name} had no answer in {limit} s")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            with self._news:  # often before the stream of events notices
                self._gone = self._gone or Gone(f"{name}: {text}")
                self._news.notify_all()
            raise self._ended()
        raise Refused(code, text)

    def close(self):
        """Ends the stream of events: the last word for every request of this engine.

        The daemon frees the regions then; whoever has mapped them stops using them first.
        """
        with self._news:
            self._gone = self._gone or Gone("the client is closed")
            self._news.notify_all()
        if self._stream:
            self._stream.cancel()
        self._channel.close()
        if self._reader and self._reader is not threading.current_thread():
            self._reader.join(5)
