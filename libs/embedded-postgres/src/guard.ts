import { spawn, type ChildProcess } from 'node:child_process';
import { rm } from 'node:fs/promises';
import { Socket } from 'node:net';
import { EmbeddedPostgresError } from './errors';
import type { ShutdownMode } from './options';

/** What a guard removes and stops. */
export interface Guarded {
  workFolder: string;
  dataDir: string;
  /** Whether the data outlives the server. */
  kept: boolean;
  /** How the server is stopped when this process dies. */
  mode: ShutdownMode;
}

/*
 * Reads "<what> <process id>" lines until this process closes the pipe, which the system does for it however it dies,
 * then cleans up. initdb is killed as a group, for it has children. A server whose file is gone has ended even if its
 * id lingers as a zombie, as it does under a process 1 that does not reap.
 */
const SCRIPT = `
trap '' HUP INT QUIT TERM
work=$1 data=$2 kept=$3 signal=$4 what=none id=0
while read -r next next_id; do what=$next id=$next_id; done
if [ "$what" = initdb ]; then
  kill -s KILL -- "-$id"
  i=0
  while kill -s 0 -- "-$id" && [ $i -lt 100 ]; do i=$((i + 1)); sleep 0.05; done
  if [ "$kept" = yes ]; then rm -rf "$data"/*; fi
elif [ "$what" = server ]; then
  kill -s "$signal" "$id"
  i=0
  while kill -s 0 "$id" && [ -e "$data/postmaster.pid" ]; do
    i=$((i + 1))
    if [ $i -eq 1200 ]; then kill -s QUIT "$id"; fi
    if [ $i -ge 1400 ]; then kill -s KILL "$id"; break; fi
    sleep 0.05
  done
fi
i=0
while ! rm -rf "$work" && [ $i -lt 20 ]; do i=$((i + 1)); sleep 0.1; done
`;

/**
 * A process of its own session that outlives this one for a moment: when this process ends, by SIGKILL too, it stops
 * the server and removes the temporary folder. It gets none of the signals meant for this process or its group.
 */
export class Guard {
  private readonly ended: Promise<void>;

  private constructor(
    private readonly process: ChildProcess,
    private readonly guarded: Guarded,
  ) {
    this.ended = new Promise((resolve) => process.once('close', () => resolve()));
    process.stdin?.on('error', () => undefined);
    process.unref();
    if (process.stdin instanceof Socket) process.stdin.unref();
  }

  static start(guarded: Guarded): Promise<Guard> {
    const { workFolder, dataDir, kept, mode } = guarded;
    const signal = mode === 'fast' ? 'INT' : 'QUIT';
    const args = ['-c', SCRIPT, 'leasehold-pg-guard', workFolder, dataDir, kept ? 'yes' : 'no', signal];
    const process = spawn('/bin/sh', args, { cwd: '/', detached: true, stdio: ['pipe', 'ignore', 'ignore'] });
    return new Promise((resolve, reject) => {
      process.once('spawn', () => resolve(new Guard(process, guarded)));
      process.once('error', (cause) =>
        reject(
          new EmbeddedPostgresError(
            'GUARD_FAILED',
            `The process that stops the server after us did not start (${cause.message}): /bin/sh is needed.`,
            { cause },
          ),
        ),
      );
    });
  }

  /** From now on the process to end is this one. */
  watch(what: 'initdb' | 'server', pid: number): void {
    this.process.stdin?.write(`${what} ${pid}\n`);
  }

  /** No process of ours runs. */
  watchNothing(): void {
    this.process.stdin?.write('none 0\n');
  }

  /** Has the guard do its work now; the folder is gone even if somebody killed the guard. */
  async finish(): Promise<void> {
    this.process.ref();
    this.process.stdin?.end();
    await this.ended;
    await rm(this.guarded.workFolder, { recursive: true, force: true });
  }
}
