import { type ChildProcess, fork } from 'node:child_process';
import { join } from 'node:path';
import type { CommandName, Commands, Progress, Reply } from './protocol';

const SCRIPT = join(__dirname, 'agent.js');
const KEPT_STDERR = 4000;
/** No command takes longer than a fill of five million jobs. */
const CALL_MS = 600_000;

interface Waiting {
  resolve: (result: unknown) => void;
  reject: (error: Error) => void;
  timer: NodeJS.Timeout;
}

/** An agent as its parent sees it. */
export class AgentProcess {
  readonly pid: number;
  readonly exited: Promise<void>;
  /** Settles when its adapter is loaded. */
  readonly ready: Promise<void>;
  progress: Progress = { started: 0, firstAt: 0, lastAt: 0, added: 0 };
  /** Why it ended, once it has. */
  end: string | undefined;
  private readonly child: ChildProcess;
  private readonly waiting = new Map<number, Waiting>();
  private lastId = 0;
  private stderr = '';

  constructor(
    private readonly name: string,
    node: string,
    adapterUrl: string,
  ) {
    this.child = fork(SCRIPT, [adapterUrl], {
      execPath: node,
      execArgv: [],
      stdio: ['ignore', 'pipe', 'pipe', 'ipc'],
    });
    this.pid = this.child.pid ?? 0;
    for (const stream of [this.child.stdout, this.child.stderr]) {
      stream?.on('data', (chunk: Buffer) => (this.stderr = (this.stderr + chunk.toString()).slice(-KEPT_STDERR)));
    }
    this.exited = new Promise((resolve) => {
      const ended = (how: string): void => {
        this.end ??= how;
        for (const { reject, timer } of this.waiting.values()) {
          clearTimeout(timer);
          reject(this.ended());
        }
        this.waiting.clear();
        resolve();
      };
      this.child.once('error', (error) => ended(error.message));
      this.child.once('close', (code, signal) => ended(signal ?? `exit code ${code}`));
    });
    this.ready = new Promise((resolve, reject) => {
      this.child.on('message', (reply: Reply) => {
        resolve();
        this.receive(reply);
      });
      void this.exited.then(() => reject(this.ended()));
    });
    this.ready.catch(() => undefined);
  }

  /** @throws Error with what the agent said, or with its last words when it ended */
  call<K extends CommandName>(
    command: K,
    ...[args]: Commands[K]['args'] extends undefined ? [] : [Commands[K]['args']]
  ): Promise<Commands[K]['result']> {
    if (this.end !== undefined) return Promise.reject(this.ended());
    const id = ++this.lastId;
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        this.waiting.delete(id);
        reject(new Error(`${this.name}: '${command}' has not ended within ${CALL_MS / 1000} s`));
      }, CALL_MS);
      this.waiting.set(id, { resolve: resolve as Waiting['resolve'], reject, timer });
      this.child.send({ id, command, args }, () => undefined);
    });
  }

  kill(signal: NodeJS.Signals): void {
    if (this.end === undefined) this.child.kill(signal);
  }

  private receive(reply: Reply): void {
    if ('progress' in reply) {
      this.progress = reply.progress;
      return;
    }
    const waiting = this.waiting.get(reply.id);
    if (!waiting) return;
    this.waiting.delete(reply.id);
    clearTimeout(waiting.timer);
    if (reply.ok) waiting.resolve(reply.result);
    else waiting.reject(new Error(`${this.name}: ${reply.error}`));
  }

  private ended(): Error {
    const words = this.stderr.trim();
    return new Error(`${this.name} has ended (${this.end ?? 'unknown'})${words === '' ? '' : `: ${words}`}`);
  }
}
