import { spawn } from 'node:child_process';
import { once } from 'node:events';

/** A frozen process. */
export interface Frozen {
  /** Lets it go on. Idempotent. */
  thaw(): Promise<void>;
}

/* Stops the process $1 until its own stdin closes, which the system does when we die: no frozen process is left behind. */
const SCRIPT = `
trap '' HUP INT QUIT TERM
kill -s STOP "$1" || exit 1
echo frozen
read -r line
kill -s CONT "$1"
`;

/** Freezes a process with SIGSTOP. */
export async function freeze(pid: number): Promise<Frozen> {
  const keeper = spawn('/bin/sh', ['-c', SCRIPT, 'leasehold-freezer', String(pid)], {
    detached: true,
    stdio: ['pipe', 'pipe', 'ignore'],
  });
  const ended = once(keeper, 'close').catch(() => undefined);
  keeper.stdin.on('error', () => undefined);
  const frozen = await Promise.race([once(keeper.stdout, 'data').then(() => true), ended.then(() => false)]);
  if (!frozen) throw new Error(`Process ${pid} could not be frozen`);
  return {
    thaw: async () => {
      keeper.stdin.end();
      await ended;
    },
  };
}
