import { readFileSync } from 'node:fs';

/** Linux tells CPU times in hundredths of a second, whatever the kernel counts in. */
const TICK_US = 10_000;

interface ProcessTimes {
  own: number;
  exitedChildren: number;
}

/** In ticks; undefined when the process is gone, or where there is no /proc. */
function timesOf(pid: number | string): ProcessTimes | undefined {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    // The name, in parentheses, may hold spaces; the fields after it do not.
    const fields = stat
      .slice(stat.lastIndexOf(')') + 2)
      .split(' ')
      .map(Number);
    const [user = 0, system = 0, childUser = 0, childSystem = 0] = fields.slice(11, 15);
    return { own: user + system, exitedChildren: childUser + childSystem };
  } catch {
    return undefined;
  }
}

/** CPU of one process, µs; undefined where it cannot be read. */
export function processCpuUs(pid: number): number | undefined {
  const times = timesOf(pid);
  return times && times.own * TICK_US;
}

/** CPU of a whole PostgreSQL server, µs: the postmaster, its backends, and those that have ended. */
export function postgresCpuUs(postmaster: number): number | undefined {
  const times = timesOf(postmaster);
  if (!times) return undefined;
  const children = readFileSync(`/proc/${postmaster}/task/${postmaster}/children`, 'utf8').trim().split(/\s+/);
  const alive = children.reduce((sum, child) => sum + (timesOf(child)?.own ?? 0), 0);
  return (times.own + times.exitedChildren + alive) * TICK_US;
}

/** Time that one process has been on a CPU, ns: finer than ticks. Undefined where it cannot be read. */
export function onCpuNs(pid: number): number | undefined {
  try {
    return Number(readFileSync(`/proc/${pid}/schedstat`, 'utf8').split(' ')[0]);
  } catch {
    return undefined;
  }
}
