"""SSH between the hosts of a network: what mpirun and horovodrun start their agents with."""

from __future__ import annotations

import subprocess

from cluster.network import Network

_SERVER = """\
HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/key.pub
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
StrictModes no
MaxStartups 100
SetEnv PATH={path} {variables}
"""
_CLIENT = """\
IdentityFile /etc/ssh/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def let_in(network: Network, variables: dict[str, str]) -> None:
    """Lets every host into every other without a question.

    Args:
        network: Of the hosts.
        variables: What every program that is started over SSH finds set.
    """
    folder = network.folder / "etc" / "ssh"
    key = str(folder / "key")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    given = " ".join(f"{name}={value}" for name, value in variables.items())
    (folder / "sshd_config").write_text(_SERVER.format(path=network.hosts[0].path, variables=given))
    (folder / "ssh_config").write_text(_CLIENT)
    for host in network.hosts:
        host.check(["/usr/sbin/sshd", "-E", str(network.folder / f"sshd-{host.name}.log")])
