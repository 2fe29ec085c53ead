import { fork, type ChildProcess, type Serializable } from 'node:child_process';
import { basename, join } from 'node:path';
import { createInterface } from 'node:readline';
import type { Readable } from 'node:stream';
import { inspect } from 'node:util';

/** How to start a fixture. */
export interface StartProcessOptions {
  /** On top of this process's environment; `undefined` takes a variable away. */
  env?: Record<string, string | undefined>;
  args?: string[];
  /** Flags of Node itself. */
  execArgv?: string[];
  /** In a process group of its own, so that a signal can be sent to the group (`process.kill(-pid, …)`). */
  detached?: boolean;
  /** Run as another account; for a test that root runs. */
  account?: { uid: number; gid: number };
}

/** How a process ended. */
export interface Exit {
  code: number | null;
  signal: NodeJS.Signals | null;
}

interface Listener {
  /** Looks at a message, and is taken off when it wants no more. */
  offer(message: unknown): boolean;
  fail(error: Error): void;
}

const KEPT_LINES = 2_000;
const DEFAULT_TIMEOUT_MS = 15_000;
const running = new Set<TestProcess>();

/** A Node process that speaks with the test by messages, and whose output is kept for the failure's message. */
export class TestProcess {
  readonly pid: number;
  /** Settles when the process is gone and its output is read. */
  readonly exited: Promise<Exit>;
  /** The last lines of stdout and stderr, in the order of their coming. */
  readonly lines: string[] = [];
  private readonly unread: unknown[] = [];
  private readonly listeners = new Set<Listener>();
  private exit: Exit | undefined;

  constructor(
    private readonly child: ChildProcess,
    private readonly label: string,
  ) {
    this.pid = child.pid ?? 0;
    running.add(this);
    for (const stream of [child.stdout, child.stderr]) if (stream) this.capture(stream);
    child.on('message', (message) => this.receive(message));
    child.on('error', (error) => this.failAll(error.message));
    this.exited = new Promise((resolve) =>
      child.once('close', (code, signal) => {
        running.delete(this);
        this.exit = { code, signal };
        this.failAll(`ended (${code ?? signal})`);
        resolve(this.exit);
      }),
    );
  }

  get hasExited(): boolean {
    return this.exit !== undefined;
  }

  get output(): string {
    return this.lines.join('\n');
  }

  send(message: Serializable): void {
    if (!this.child.connected) throw this.failure(`cannot be sent ${inspect(message)}`);
    this.child.send(message, () => undefined);
  }

  /**
   * The next message that fits, among those that came and were not taken yet, too. Others stay for other calls.
   *
   * @throws Error with the output of the process when it ends, or `timeoutMs` passes, before that
   */
  next<M = Record<string, unknown>>(fits: (message: M) => boolean, timeoutMs = DEFAULT_TIMEOUT_MS): Promise<M> {
    const index = this.unread.findIndex((message) => fits(message as M));
    if (index >= 0) return Promise.resolve(this.unread.splice(index, 1)[0] as M);
    if (this.exit) return Promise.reject(this.failure(`ended (${this.exit.code ?? this.exit.signal})`));
    return new Promise((resolve, reject) => {
      const done = (): void => {
        clearTimeout(timer);
        this.listeners.delete(listener);
      };
      const listener: Listener = {
        offer: (message) => {
          if (!fits(message as M)) return false;
          done();
          resolve(message as M);
          return true;
        },
        fail: (error) => {
          done();
          reject(error);
        },
      };
      const timer = setTimeout(
        () => listener.fail(this.failure(`sent no message that fits ${String(fits)} in ${timeoutMs} ms`)),
        timeoutMs,
      );
      this.listeners.add(listener);
    });
  }

  /** Sends a signal; it does not wait for the end, {@link exited} does. */
  kill(signal: NodeJS.Signals = 'SIGTERM'): void {
    if (!this.hasExited) this.child.kill(signal);
  }

  /** Waits for the end, and fails with the output when it does not come. */
  async untilExit(timeoutMs = DEFAULT_TIMEOUT_MS): Promise<Exit> {
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<never>((_, reject) => {
      timer = setTimeout(() => reject(this.failure(`still runs after ${timeoutMs} ms`)), timeoutMs);
    });
    return Promise.race([this.exited, late]).finally(() => clearTimeout(timer));
  }

  private capture(stream: Readable): void {
    createInterface({ input: stream }).on('line', (line) => {
      this.lines.push(line);
      if (this.lines.length > KEPT_LINES) this.lines.splice(0, this.lines.length - KEPT_LINES);
    });
  }

  private receive(message: unknown): void {
    for (const listener of this.listeners) if (listener.offer(message)) return;
    this.unread.push(message);
  }

  private failAll(why: string): void {
    for (const listener of [...this.listeners]) listener.fail(this.failure(why));
  }

  private failure(why: string): Error {
    const messages = this.unread.length > 0 ? `\nMessages not taken: ${inspect(this.unread.slice(-20))}` : '';
    return new Error(
      `${this.label} (pid ${this.pid}) ${why}.${messages}\nOutput:\n${this.lines.slice(-100).join('\n')}`,
    );
  }
}

/** Path of a compiled fixture of `test/fixtures`, by its name without extension. */
export function fixture(name: string): string {
  return join(__dirname, '..', 'fixtures', `${name}.js`);
}

/**
 * Starts a compiled script; it is killed after the spec at the latest. Let it end on `disconnect`, for a jest that is
 * itself killed runs no hooks.
 */
export function startProcess(path: string, options: StartProcessOptions = {}): TestProcess {
  const { env, args = [], execArgv = [], detached = false, account } = options;
  const child = fork(path, args, {
    ...account,
    detached,
    env: { ...process.env, ...env },
    execArgv,
    stdio: ['ignore', 'pipe', 'pipe', 'ipc'],
  });
  return new TestProcess(child, basename(path, '.js'));
}

/** Kills every process that still runs, stopped ones too, and waits for their end. */
export async function killProcesses(): Promise<void> {
  const left = [...running];
  for (const child of left) child.kill('SIGKILL');
  await Promise.all(left.map((child) => child.exited));
}

// A spec that imports this file is cleaned up after, also when it fails, and before its own afterAll hooks run.
afterAll(killProcesses);
