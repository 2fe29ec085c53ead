import { EmbeddedPostgresError } from './errors';
import { urlOf } from './database';
import type { EmbeddedPostgres, ShutdownMode } from './options';
import { ServerProcess, type ServerCommand } from './server-process';

/** A started server in the hands of the caller. Stops and restarts happen one after the other. */
export class RunningServer implements EmbeddedPostgres {
  readonly url: string;
  readonly port: number;
  readonly dataDir: string;
  private stopping: Promise<void> | undefined;
  private lastRestart: Promise<void> = Promise.resolve();

  constructor(
    private server: ServerProcess,
    private readonly command: ServerCommand,
    database: string,
    private readonly stopMode: ShutdownMode,
  ) {
    this.port = command.port;
    this.dataDir = command.dataDir;
    this.url = urlOf(command.port, database);
  }

  get pid(): number {
    return this.server.pid;
  }

  stop(): Promise<void> {
    this.stopping ??= this.lastRestart
      .catch(() => undefined)
      .then(() => this.server.stop(this.stopMode))
      .finally(() => this.command.guard.finish());
    return this.stopping;
  }

  restart(mode: ShutdownMode = 'fast'): Promise<void> {
    if (this.stopping) {
      return Promise.reject(new EmbeddedPostgresError('STOPPED', 'The server was stopped: start a new one.'));
    }
    this.lastRestart = this.lastRestart
      .catch(() => undefined)
      .then(async () => {
        await this.server.stop(mode);
        this.server = await ServerProcess.start(this.command);
      });
    return this.lastRestart;
  }
}
