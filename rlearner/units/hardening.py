"""What the processes' units take away from them, and why some need what others do not."""

from __future__ import annotations

from typing import Final

# For every process; User= is not root, and files of its own are in StateDirectory, CacheDirectory
# and RuntimeDirectory.
COMMON: Final = (
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "PrivateTmp=yes",
    "ProtectClock=yes",
    "ProtectProc=invisible",
    "ProtectControlGroups=yes",
    "ProtectKernelModules=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "SystemCallArchitectures=native",
    "SystemCallErrorNumber=EPERM",
    "KeyringMode=private",
    "UMask=0077",
    "LimitCORE=0",
)
# A sandbox makes namespaces, mounts a /proc in its own, which the kernel allows only if nothing
# hides a part of this one, and names its host.
NO_SANDBOX: Final = (
    "ProtectKernelTunables=yes",
    "ProtectKernelLogs=yes",
    "ProtectHostname=yes",
    "RestrictNamespaces=yes",
    "SystemCallFilter=@system-service",
    # Not @resources: ZeroMQ sets the scheduling of its threads, and aborts where it cannot.
    "SystemCallFilter=~@privileged",
)
SANDBOX: Final = (
    "RestrictNamespaces=user mnt pid net ipc uts cgroup",
    "SystemCallFilter=@system-service @mount seccomp sethostname",
)
# No device but null, random and the like.
NO_GPU: Final = ("PrivateDevices=yes",)
# Names of /proc/devices; those that this host lacks match nothing.
GPU: Final = (
    "DevicePolicy=closed",
    *(
        f"DeviceAllow={name} rw"
        for name in (
            "char-nvidia*", "char-kfd", "char-drm", "char-infiniband*",
        )
    ),
)  # fmt: skip
