"""Ways in which a job hangs, as scripts that know nothing of anyrank: twelve on three ranks, and
four on any number of them.

The line at which the culprit stands is marked `# HERE`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

PRELUDE = """
import ctypes, datetime, os, pathlib, queue, signal, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

timeout = datetime.timedelta(seconds=float(os.environ.get("TIMEOUT_SEC", "1800")))
device = os.environ.get("HANG_DEVICE", "cpu")  # or cuda, or sim (tests/device)
if device == "sim":
    import tests.device.sim
if device != "cpu":
    number = int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(number)
backend = {"cpu": "gloo", "cuda": "nccl", "sim": "cpu:gloo,sim:simccl"}[device]
dist.init_process_group(backend, timeout=timeout)
torch.set_default_device(device)
rank = dist.get_rank()
if len(sys.argv) > 1:
    import anyrank
    anyrank.watch(sys.argv[1], exit=True, report=sys.argv[2])
torch.manual_seed(0)
x = torch.ones(4)
parts = [torch.ones(4) for _ in range(dist.get_world_size())]
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def note(*_):
    pathlib.Path(f"step-{rank}").touch()


register_optimizer_step_post_hook(note)


def step(batch):
    model(batch).sum().backward()
    dist.all_reduce(x)
    optimizer.step()
    float(x[0])  # where all ranks stand under NCCL

"""


@dataclass(frozen=True)
class Hang:
    """One way to hang.

    Attributes:
        culprit: the rank that holds up the others.
        kinds: what the report may call it.
        body: of the script, after `prelude`.
        has_line: whether the report names a line; a process that is stopped has none.
        mark: of the lines at which the culprit may stand.
        outlives: whether the launcher must not see the end of the rank, as a wrapper hides it.
    """

    culprit: int
    kinds: tuple[str, ...]
    body: str
    has_line: bool = True
    mark: str = "# HERE"
    outlives: bool = False
    prelude: str = PRELUDE

    @property
    def script(self) -> str:
        """The whole script."""
        return self.prelude + self.body

    @property
    def lines(self) -> list[int]:
        """The lines at which the culprit may stand."""
        return [n for n, text in enumerate(self.script.splitlines(), 1) if self.mark in text]


STEP = PRELUDE[PRELUDE.index("def step(batch):") :]
# The same step as one of `Checkpoints.steps`, whose body is what follows until the next call.
STEP_OF_A_RUN = """
import functools
import anyrank


@functools.cache
def steps():
    loader = anyrank.ElasticLoader(torch.ones(90, 4), global_batch=3, microbatch=1)
    run = anyrank.Checkpoints("run", anyrank.TrainState(model, optimizer, data=loader))
    run.__enter__()
    run.resume()
    return run.steps(until=1000)


def step(batch):
    part = next(steps())
    for microbatch in part.microbatches(model):
        part.backward(model(microbatch).sum())
    dist.all_reduce(x)
    optimizer.step()
    float(x[0])

"""


def within_a_run(hang: Hang) -> Hang:
    """The same hang in the body of a step of `Checkpoints.steps`."""
    return dataclasses.replace(hang, prelude=PRELUDE.replace(STEP, STEP_OF_A_RUN))


HANGS = {
    "skips a collective": Hang(
        1,
        ("mismatch",),
        """
for number in range(100):
    step(x)
    if not (rank == 1 and number == 5):
        dist.all_reduce(x)
    dist.all_gather(parts, x)  # HERE
""",
    ),
    "another order": Hang(
        2,
        ("mismatch",),
        """
for number in range(100):
    step(x)
    if rank == 2 and number == 4:
        dist.all_gather(parts, x)  # HERE
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)
        dist.all_gather(parts, x)
""",
    ),
    "an empty tensor": Hang(
        1,
        ("mismatch",),
        """
for number in range(100):
    step(x)
    dist.all_reduce(torch.zeros(0) if rank == 1 and number == 5 else x)  # HERE
    dist.all_gather(parts, x)
""",
    ),
    "a save under if rank == 0": Hang(
        0,
        ("mismatch",),
        """
def save_checkpoint():
    dist.all_gather(parts, x)  # HERE

for number in range(100):
    step(x)
    if number == 5 and rank == 0:
        save_checkpoint()
""",
    ),
    "a branch by rank under FSDP2": Hang(
        1,
        ("mismatch",),
        """
from torch.distributed.fsdp import fully_shard

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        if dist.get_rank() == 1 and self.calls == 5:
            x = self.extra(x)
        return self.last(x)

model = Net()
for part in (model.first, model.extra, model.last, model):
    fully_shard(part)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(100):
    step(x)
    optimizer.zero_grad()
""",
        mark="backward(",
    ),
    "a swallowed exception": Hang(
        2,
        ("mismatch",),
        """
def train(number):
    try:
        if rank == 2 and number == 5:
            raise ValueError("a bad sample")
        step(x)
    except ValueError as error:
        print(error)
    dist.all_gather(parts, x)  # HERE

for number in range(100):
    train(number)
""",
    ),
    "a loader that stalls": Hang(
        1,
        ("loader",),
        """
class Data(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if rank == 1 and index == 20:
            time.sleep(1000)  # HERE
        return x

for batch in DataLoader(Data(), batch_size=4):
    step(batch)
""",
    ),
    "a killed worker under a prefetching thread": Hang(
        1,
        ("worker",),
        """
class Data(Dataset):
    def __len__(self):
        return 10000
    def __getitem__(self, index):
        time.sleep(0.02)
        if rank == 1 and index == 1920:  # after 20 s, so that a busy watch has seen it too
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)

batches = queue.Queue(4)

def fetch():
    for batch in DataLoader(Data(), batch_size=4, num_workers=2):
        batches.put(batch)

threading.Thread(target=fetch, daemon=True).start()
while True:
    step(batches.get())  # HERE
""",
    ),
    "SIGSTOP": Hang(
        1,
        ("stopped",),
        """
for number in range(100):
    if rank == 1 and number == 5:
        os.kill(os.getpid(), signal.SIGSTOP)
    step(x)
""",
        has_line=False,
    ),
    "SIGKILL with sockets kept open by a child": Hang(
        1,
        ("killed",),
        """
for number in range(100):
    if rank == 1 and number == 5:
        if os.fork() == 0:
            for _ in range(50):
                if not os.path.exists("out"):
                    time.sleep(1)
            time.sleep(10)  # until the others have ended
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    step(x)
""",
        has_line=False,
        outlives=True,
    ),
    "the GIL held in C": Hang(
        1,
        ("gil",),
        """
def native():
    libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)  # HERE

for number in range(100):
    if rank == 1 and number == 5:
        native()
    step(x)
""",
    ),
    "an endless loop": Hang(
        2,
        ("slow",),
        """
def settle():
    turns = 0
    while True:  # HERE
        turns += 1  # HERE

for number in range(100):
    if rank == 2 and number == 5:
        settle()
    step(x)
""",
    ),
}

# With async_op=True, as all collectives are under NCCL: the line is that of the call, and ranks
# stand elsewhere.
ASYNCHRONOUS = {
    "an all_gather that rank 0 alone starts": Hang(
        0,
        ("mismatch",),
        """
def save_checkpoint():
    return dist.all_gather(parts, torch.ones(4), async_op=True)  # HERE

for number in range(100):
    step(x)
    if number == 5 and rank == 0:
        handle = save_checkpoint()
""",
    ),
    "one that a rank leaves out": Hang(
        1,
        ("mismatch",),
        """
y = torch.ones(4)

def gather():
    return dist.all_gather(parts, x, async_op=True)  # HERE

for number in range(100):
    step(x)
    handles = []
    if not (rank == 1 and number == 5):
        handles.append(dist.all_reduce(y, async_op=True))
    handles.append(gather())
    for handle in handles:
        handle.wait()
""",
    ),
    "the last one, that a rank leaves out": Hang(
        2,
        ("slow",),
        """
def evaluate():
    time.sleep(1000)  # HERE

for number in range(100):
    step(x)
    if number == 5 and rank == 2:
        evaluate()
    handle = dist.all_reduce(torch.ones(4), async_op=True)
    time.sleep(0.01)
    handle.wait()
""",
    ),
    "an empty tensor of a rank": Hang(
        2,
        ("mismatch",),
        """
def reduce(values):
    return dist.all_reduce(values, async_op=True)  # HERE

for number in range(100):
    step(x)
    handle = reduce(torch.ones(0 if number == 5 and rank == 2 else 4))
    mean = x.sum().item()
    handle.wait()
""",
    ),
    "two groups in another order": Hang(
        1,
        ("order",),
        """
first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])

def reduce(group):
    return dist.all_reduce(torch.ones(4), group=group, async_op=True)  # HERE

for number in range(100):
    step(x)
    for group in (second, first) if number == 5 and rank == 1 else (first, second):
        handle = reduce(group)
        handle.wait()
""",
    ),
    "a swallowed exception before one": Hang(
        2,
        ("mismatch",),
        """
y = torch.ones(4)

def train(number):
    handle = None
    try:
        if rank == 2 and number == 5:
            raise ValueError("a bad sample")
        handle = dist.all_reduce(y, async_op=True)
    except ValueError as error:
        print(error)
    other = dist.all_gather(parts, x, async_op=True)  # HERE
    model(x).sum().backward()
    optimizer.step()
    if handle is not None:
        handle.wait()
    other.wait()

for number in range(100):
    train(number)
""",
    ),
}

# Messages, of which gloo's recorder has nothing but how many there were.
MESSAGES = {
    "a send that a rank leaves out": Hang(
        1,
        ("skipped",),
        """
for number in range(100):
    step(x)
    if rank == 0:
        dist.recv(x, 1)
    if rank == 1 and number != 5:
        dist.send(x, 0)
    dist.all_gather(parts, x)  # HERE
""",
    ),
}

# On any number of ranks, of which the last holds up the others.
ON_MANY_RANKS = {
    "asleep": Hang(
        -1,
        ("slow",),
        """
def evaluate():
    time.sleep(1000)  # HERE

for number in range(100):
    step(x)
    if number == 5 and rank == dist.get_world_size() - 1:
        evaluate()
""",
    ),
    "another collective": Hang(
        -1,
        ("mismatch",),
        """
for number in range(100):
    step(x)
    if number == 5 and rank == dist.get_world_size() - 1:
        dist.all_gather(parts, x)  # HERE
""",
    ),
    "in a loader": Hang(
        -1,
        ("loader",),
        """
class Data(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index == 20 and rank == dist.get_world_size() - 1:
            time.sleep(1000)  # HERE
        return x

for batch in DataLoader(Data(), batch_size=4):
    step(batch)
""",
    ),
    "killed": Hang(
        -1,
        ("killed",),
        """
for number in range(100):
    if number == 5 and rank == dist.get_world_size() - 1:
        if os.fork() == 0:  # has its sockets
            for _ in range(120):
                if not os.path.exists("out"):
                    time.sleep(1)
            time.sleep(10)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    step(x)
""",
        has_line=False,
        outlives=True,
    ),
}

# What `benchmarks/watch.py --device` runs: of both tables, and one of CUDA that is no hang.
ON_DEVICE = {
    **{name: HANGS[name] for name in HANGS if "worker" not in name and "GIL" not in name},
    **ASYNCHRONOUS,
    "one long kernel": Hang(
        -1,  # nobody
        (),
        """
for number in range(3):
    step(x)
    if number == 1 and rank == 0:
        torch.cuda._sleep(60_000_000_000)  # half a minute of an H100
""",
        has_line=False,
    ),
}
