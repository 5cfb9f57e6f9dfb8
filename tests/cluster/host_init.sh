# Process 1 of a host: sets up its namespaces and holds them until its standard input ends.
# Arguments: the host's name, the folder that hosts share (under /tmp), and Python.
set -eu
name=$1 folder=$2 python=$3
checkout=$(cd "$(dirname "$0")/../.." && pwd -P)
environments=${python%/*/bin/*}  # that of the launchers, beside the one that it is made from
hostname "$name"
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
for kept in "$folder" "$checkout" "$environments"; do
	case "$kept" in /tmp/*)  # it would be hidden by the host's own /tmp
		mkdir -p "/mnt/${kept#/tmp/}"
		mount --bind "$kept" "/mnt/${kept#/tmp/}"
	esac
done
mount --move /mnt /tmp
mount --bind "$folder/etc/hosts" /etc/hosts
kept=~/.config/isotrain  # the key that a person has on all hosts
mkdir -p "$kept"
mount --bind "$folder/home" "$kept"
[ ! -d /etc/ssh ] || mount --bind "$folder/etc/ssh" /etc/ssh
mkdir -p /run/sshd /run/munge /run/slurm/spool /run/slurm/state
ip link set lo up
# Children that nobody waits for must not stay as zombies: some launchers take these for alive.
exec "$python" -S -c '
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
'
