"""A slow cable: passes what one tap device sends to another process, late.

`relay.py DEVICE DELAY_SEC FD`, in the device's network namespace; FD is a socket to the other end.
"""

from __future__ import annotations

import collections
import fcntl
import os
import select
import socket
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MAX_BYTES = 65536


def main() -> None:
    """Relay until the other end is gone."""
    name, delay, other = sys.argv[1], float(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([device, other], [], [], pause)
        if device in ready:
            waiting.append((time.monotonic() + delay, os.read(device, MAX_BYTES)))
        if other in ready:
            packet = other.recv(MAX_BYTES)
            if not packet:
                return
            os.write(device, packet)
        while waiting and waiting[0][0] <= time.monotonic():
            other.send(waiting.popleft()[1])


if __name__ == "__main__":
    main()
