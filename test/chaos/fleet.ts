import { type ChildProcess, fork } from 'node:child_process';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

const BOOT_MS = 30_000;

/** A worker process of the campaign. */
export class Worker {
  frozen = false;
  readonly exited: Promise<void>;

  constructor(
    readonly name: string,
    readonly child: ChildProcess,
  ) {
    this.exited = new Promise((resolve) => child.once('exit', () => resolve()));
  }

  get alive(): boolean {
    return this.child.exitCode === null && this.child.signalCode === null;
  }

  kill(signal: NodeJS.Signals): void {
    this.child.kill(signal);
    if (signal === 'SIGSTOP') this.frozen = true;
    if (signal === 'SIGCONT') this.frozen = false;
  }
}

/** Keeps so many workers up: whoever ends is replaced. */
export class Fleet {
  private readonly workers = new Set<Worker>();
  private started = 0;
  private closing = false;

  constructor(
    private readonly url: string,
    private readonly size: number,
  ) {}

  get up(): Worker[] {
    return [...this.workers].filter(({ alive, frozen }) => alive && !frozen);
  }

  async fill(): Promise<void> {
    const missing = this.size - [...this.workers].filter(({ alive }) => alive).length;
    await Promise.all(Array.from({ length: Math.max(0, missing) }, () => this.start()));
  }

  async start(): Promise<Worker | undefined> {
    const child = fork(join(__dirname, 'chaos-worker.js'), [], {
      env: { ...process.env, CHAOS_URL: this.url },
      stdio: ['ignore', 'ignore', 'inherit', 'ipc'],
    });
    const worker = new Worker(`w${++this.started}`, child);
    this.workers.add(worker);
    child.once('exit', () => {
      this.workers.delete(worker);
      // A poison job, or a fault: the orchestrator of a real fleet starts another.
      if (!this.closing) setTimeout(() => this.closing || void this.fill(), 200);
    });
    const ready = new Promise<boolean>((resolve) => {
      child.once('message', () => resolve(true));
      child.once('exit', () => resolve(false));
    });
    return (await Promise.race([ready, sleep(BOOT_MS, false)])) ? worker : undefined;
  }

  /** Everybody thawed, then told to end; whoever does not is killed. @returns how many had to be */
  async stop(graceMs = 15_000): Promise<number> {
    this.closing = true;
    const all = [...this.workers];
    for (const worker of all) {
      worker.kill('SIGCONT');
      worker.kill('SIGTERM');
    }
    const gone = Promise.all(all.map(({ exited }) => exited));
    await Promise.race([gone, sleep(graceMs)]);
    const left = all.filter(({ alive }) => alive);
    for (const worker of left) worker.kill('SIGKILL');
    await gone;
    return left.length;
  }
}
