import { type ChildProcess, fork } from 'node:child_process';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { TcpProxy } from '../support/tcp-proxy';

const BOOT_MS = 30_000;
const ASK_MS = 300;
const FAKETIME = '/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1';

/** What the campaign asks of a worker. */
export type ToWorker = { block: number } | { hog: number } | { endBeat: true } | { ask: 'leader' };

/** What is different in this one. */
export interface Oddity {
  /** Its code does not know the kind of most jobs: the older half of a deploy. */
  lacksKind?: boolean;
  /** Its wall clock is off by so much. */
  clockOffsetMs?: number;
}

/** A worker process of the campaign, and its own line to the database. */
export class Worker {
  frozen = false;
  readonly exited: Promise<void>;

  constructor(
    readonly name: string,
    readonly child: ChildProcess,
    readonly line: TcpProxy,
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

  tell(message: ToWorker): void {
    // One that is ending has closed the channel.
    if (this.child.connected) this.child.send(message, () => undefined);
  }

  /** False also when there is no answer. */
  async isLeader(): Promise<boolean> {
    const { child } = this;
    if (!child.connected || this.frozen) return false;
    let listener: ((message: { leader?: boolean }) => void) | undefined;
    const answer = new Promise<boolean>((resolve) => {
      listener = ({ leader }) => leader !== undefined && resolve(leader);
      child.on('message', listener);
    });
    this.tell({ ask: 'leader' });
    const leads = await Promise.race([answer, sleep(ASK_MS, false)]);
    if (listener) child.off('message', listener);
    return leads;
  }
}

/** Keeps so many workers up: whoever ends is replaced. */
export class Fleet {
  private readonly workers = new Set<Worker>();
  private readonly lines = new Set<TcpProxy>();
  private started = 0;
  private closing = false;

  constructor(
    private url: string,
    private readonly size: number,
  ) {}

  /** Those that can work. */
  get up(): Worker[] {
    return [...this.workers].filter(({ alive, frozen }) => alive && !frozen);
  }

  async leader(): Promise<Worker | undefined> {
    const { up } = this;
    const leads = await Promise.all(up.map((worker) => worker.isLeader()));
    return up.find((_, i) => leads[i]);
  }

  /** The server's address has moved: those that start from now on go there, and all lines that are open. */
  retarget(url: string): void {
    this.url = url;
    for (const line of this.lines) line.retarget(url);
  }

  async fill(): Promise<void> {
    const missing = this.size - [...this.workers].filter(({ alive }) => alive).length;
    await Promise.all(Array.from({ length: Math.max(0, missing) }, () => this.start()));
  }

  async start(oddity: Oddity = {}): Promise<Worker | undefined> {
    const name = `w${++this.started}`;
    const line = await TcpProxy.start(this.url);
    this.lines.add(line);
    const child = fork(join(__dirname, 'chaos-worker.js'), [], {
      env: {
        ...process.env,
        ...environmentOf(oddity),
        CHAOS_URL: line.url(this.url),
        CHAOS_LEDGER: this.url,
        CHAOS_NAME: name,
      },
      stdio: ['ignore', 'ignore', 'inherit', 'ipc'],
    });
    const worker = new Worker(name, child, line);
    this.workers.add(worker);
    child.once('exit', () => {
      this.workers.delete(worker);
      this.lines.delete(line);
      void line.close();
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
      worker.line.thaw();
      worker.line.delay(0);
      worker.line.refuse(false);
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

/** libfaketime where there is one, as it also moves what the C library tells; else a faked Date in every thread. */
function environmentOf({ lacksKind, clockOffsetMs }: Oddity): NodeJS.ProcessEnv {
  const odd: NodeJS.ProcessEnv = lacksKind ? { CHAOS_LACKS_KIND: '1' } : {};
  if (clockOffsetMs === undefined) return odd;
  const seconds = Math.round(clockOffsetMs / 1000);
  return existsSync(FAKETIME)
    ? {
        ...odd,
        LD_PRELOAD: FAKETIME,
        FAKETIME: `${seconds < 0 ? '' : '+'}${seconds}s`,
        FAKETIME_DONT_FAKE_MONOTONIC: '1',
      }
    : {
        ...odd,
        FAKE_CLOCK_OFFSET_MS: String(clockOffsetMs),
        NODE_OPTIONS: `--require ${join(__dirname, '../fixtures/fake-clock.js')}`,
      };
}
