import { type ChildProcess, fork } from 'node:child_process';
import { join } from 'node:path';
import type { LeaseEvent } from '@leasehold/nestjs';
import { CONFIG, type FromWorker, type ToWorker, type WorkerConfig } from '../worker/messages';

const SCRIPT = join(__dirname, '..', 'worker', 'main.js');
const KEPT_STDERR = 4000;

/** A worker process as its parent sees it. */
export class WorkerProcess {
  readonly pid: number;
  /** Settles with how it ended. */
  readonly exited: Promise<string>;
  /** Settles when it claims; rejects when it ends before. */
  readonly ready: Promise<void>;
  /** Its present registration; it gets a new one when it was declared dead. */
  workerId: string | undefined;
  /** Former registrations. */
  readonly formerIds: string[] = [];
  state: 'starting' | 'up' | 'frozen' | 'gone' = 'starting';
  private readonly child: ChildProcess;
  private stderr = '';

  constructor(
    readonly name: string,
    config: Omit<WorkerConfig, 'name'>,
    onEvent: (event: LeaseEvent, worker: WorkerProcess) => void,
  ) {
    this.child = fork(SCRIPT, [], {
      env: { ...process.env, [CONFIG]: JSON.stringify({ ...config, name } satisfies WorkerConfig) },
      execArgv: [],
      stdio: ['ignore', 'ignore', 'pipe', 'ipc'],
    });
    this.pid = this.child.pid ?? 0;
    this.child.stderr?.on(
      'data',
      (chunk: Buffer) => (this.stderr = (this.stderr + chunk.toString()).slice(-KEPT_STDERR)),
    );
    this.exited = new Promise((resolve) => {
      this.child.once('error', (error) => resolve(error.message));
      this.child.once('exit', (code, signal) => resolve(signal ?? `exit code ${code}`));
    });
    void this.exited.then(() => (this.state = 'gone'));
    this.ready = new Promise((resolve, reject) => {
      this.child.on('message', (message: FromWorker) => {
        if (message.type === 'ready') {
          this.state = 'up';
          resolve();
        } else for (const event of message.events) this.receive(event, onEvent);
      });
      void this.exited.then((how) => reject(new Error(`Worker ${name} ended (${how})${this.lastWords}`)));
    });
    this.ready.catch(() => undefined);
  }

  get isUp(): boolean {
    return this.state === 'up';
  }

  /** What it wrote to stderr, to be put behind a message. */
  get lastWords(): string {
    const text = this.stderr.trim();
    return text === '' ? '' : `:\n${text}`;
  }

  isKnownAs(workerId: string): boolean {
    return this.workerId === workerId || this.formerIds.includes(workerId);
  }

  kill(signal: NodeJS.Signals): void {
    if (this.state !== 'gone') this.child.kill(signal);
  }

  send(message: ToWorker): void {
    if (this.child.connected) this.child.send(message, () => undefined);
  }

  private receive(event: LeaseEvent, onEvent: (event: LeaseEvent, worker: WorkerProcess) => void): void {
    if (event.type === 'worker.registered') {
      if (this.workerId !== undefined) this.formerIds.push(this.workerId);
      this.workerId = event.workerId;
    }
    onEvent(event, this);
  }
}
