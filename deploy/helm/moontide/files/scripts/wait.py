"""Return once every host:port given takes connections; says what it waits for."""

import socket
import sys
import time


def main(addresses: list[str]) -> None:
    for address in addresses:
        host, _, port = address.rpartition(":")
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=2).close()
                break
            except OSError as error:
                print(f"waiting for {address}: {error}", flush=True)
                time.sleep(2)


if __name__ == "__main__":
    main(sys.argv[1:])
