import { spawn, type ChildProcess } from 'node:child_process';
import { closeSync, openSync, readFileSync, statSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { EmbeddedPostgresError, type EmbeddedPostgresErrorCode } from './errors';
import type { Guard } from './guard';
import type { ShutdownMode } from './options';
import { readPostmasterFile } from './postmaster-file';
import { serverEnvironment, type RunContext } from './run';

/** All that a start of the server takes. */
export interface ServerCommand {
  program: string;
  dataDir: string;
  port: number;
  settings: Record<string, string>;
  logFile: string;
  context: RunContext;
  guard: Guard;
}

// Recovery after a crash may take its time on kept data.
const START_DEADLINE_MS = 120_000;
const START_POLL_MS = 20;
// A shutdown that is not done by then is made harder: fast, immediate, SIGKILL.
const STOP_DEADLINE_MS = 60_000;

/** One run of `postgres`, from its start to its end. */
export class ServerProcess {
  private hasEnded = false;
  private readonly ended: Promise<void>;

  private constructor(
    private readonly process: ChildProcess,
    readonly pid: number,
    private readonly command: ServerCommand,
    private readonly logStart: number,
  ) {
    this.ended = new Promise((resolve) =>
      process.once('exit', () => {
        this.hasEnded = true;
        command.guard.watchNothing();
        resolve();
      }),
    );
    process.unref();
  }

  /** Starts the server and resolves when it takes connections. */
  static async start(command: ServerCommand): Promise<ServerProcess> {
    const { program, dataDir, port, settings, logFile, context, guard } = command;
    const log = openSync(logFile, 'a');
    const logStart = statSync(logFile).size;
    const pairs = Object.entries({ ...settings, port: String(port) });
    const args = ['-D', dataDir, ...pairs.flatMap(([name, value]) => ['-c', `${name}=${value}`])];
    // In a session of its own: a signal to our process group (Ctrl-C) must not stop it before we have drained.
    const child = spawn(program, args, {
      ...context.account,
      cwd: context.cwd,
      env: serverEnvironment(),
      detached: true,
      stdio: ['ignore', log, log],
    });
    closeSync(log);
    const failed = new Promise<string>((resolve) => child.once('error', (error) => resolve(error.message)));
    if (child.pid === undefined) {
      throw new EmbeddedPostgresError('START_FAILED', `${program} did not start: ${await failed}`);
    }
    guard.watch('server', child.pid);
    const server = new ServerProcess(child, child.pid, command, logStart);
    await server.untilReady();
    return server;
  }

  /** Resolves when the process is gone; harder means follow when the one asked for takes too long. */
  async stop(mode: ShutdownMode): Promise<void> {
    const signals: NodeJS.Signals[] = mode === 'fast' ? ['SIGINT', 'SIGQUIT', 'SIGKILL'] : ['SIGQUIT', 'SIGKILL'];
    this.process.ref();
    for (const signal of signals) {
      this.process.kill(signal);
      if (await this.endsWithin(STOP_DEADLINE_MS)) return;
    }
    throw new EmbeddedPostgresError(
      'STOP_FAILED',
      `The server (process ${this.pid}) does not end, not even by SIGKILL: look at its disk.\n${this.logTail()}`,
    );
  }

  private async untilReady(): Promise<void> {
    const deadline = performance.now() + START_DEADLINE_MS;
    for (;;) {
      if (this.hasEnded) throw this.startFailure();
      const file = readPostmasterFile(this.command.dataDir);
      if (file?.pid === this.pid && file.status === 'ready') return;
      if (performance.now() > deadline) {
        await this.stop('immediate');
        throw this.startFailure(`not ready after ${START_DEADLINE_MS / 1000} s`);
      }
      await sleep(START_POLL_MS);
    }
  }

  private startFailure(reason = 'the server ended'): EmbeddedPostgresError {
    const log = this.logTail();
    const { port, dataDir } = this.command;
    const failure = (code: EmbeddedPostgresErrorCode, message: string): EmbeddedPostgresError =>
      new EmbeddedPostgresError(code, `${message}\n${log}`);
    if (/Address already in use/.test(log)) return failure('PORT_TAKEN', `Port ${port} was taken by another program.`);
    if (/lock file "[^"]*" already exists|pre-existing shared memory block/.test(log)) {
      return failure('DATA_DIR_IN_USE', `Another PostgreSQL server uses ${dataDir}: stop it, or use another folder.`);
    }
    return failure('START_FAILED', `PostgreSQL did not start on ${dataDir} (${reason}); its log says why:`);
  }

  private async endsWithin(ms: number): Promise<boolean> {
    const timer = new AbortController();
    const late = sleep(ms, undefined, { signal: timer.signal }).catch(() => undefined);
    await Promise.race([this.ended, late]);
    timer.abort();
    return this.hasEnded;
  }

  /** The last lines that this run wrote. */
  private logTail(): string {
    return readFileSync(this.command.logFile).subarray(this.logStart).toString().slice(-4000).trim();
  }
}
