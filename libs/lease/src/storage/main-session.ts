import { Injectable, Logger } from '@nestjs/common';
import { ThrottledLog } from '../events/throttled-log';
import { ResolvedOptions } from '../options/lease-options';
import { SESSION_SETTINGS, startupOptions } from './connection';
import { Database } from './database';
import { Session } from './session';
import { errorText } from './sql-errors';

export interface MainSessionUser {
  onUp?(session: Session): Promise<void>;
  onDown?(): void;
  onNotification?(channel: string, payload: string): void;
}

/**
 * The main thread's own connection, for the leader lock and LISTEN. The server ends it when it is silent for three probes, so a
 * process that is frozen, cut off or blocked loses its leadership by itself (R15).
 */
@Injectable()
export class MainSession {
  private readonly trouble = new ThrottledLog(new Logger('Leasehold'));
  private readonly users: MainSessionUser[] = [];
  private readonly session: Session;
  private readonly probeMs: number;
  private started = false;
  private pulse: NodeJS.Timeout | undefined;

  constructor(database: Database, options: ResolvedOptions) {
    const { direct } = database.targets;
    this.probeMs = options.leader.probeMs;
    const idleMs = Math.max(options.leader.probeMs, options.leader.retryMs) * 3;
    const settings = {
      ...SESSION_SETTINGS,
      application_name: 'leasehold main',
      statement_timeout: Math.floor(options.leader.probeMs * 0.8),
      idle_session_timeout: idleMs,
      idle_in_transaction_session_timeout: idleMs,
      client_connection_check_interval: 1000,
    };
    this.session = new Session(
      () => ({ ...direct, application_name: 'leasehold main', options: startupOptions(settings, direct.options) }),
      options.leader.probeMs,
      {
        onUp: async (session) => {
          for (const user of this.users) await user.onUp?.(session);
        },
        onDown: () => {
          for (const user of this.users) user.onDown?.();
        },
        onNotification: ({ channel, payload }) => {
          for (const user of this.users) user.onNotification?.(channel, payload ?? '');
        },
        onTrouble: (error) => this.trouble.warn('main', `Leader and wake-up connection: ${errorText(error)}`),
      },
    );
  }

  /** Must be called before `start`. */
  use(user: MainSessionUser): void {
    this.users.push(user);
  }

  get connection(): Session {
    return this.session;
  }

  start(): void {
    this.started = true;
    this.session.start();
  }

  /** For LISTEN in a process that is no worker: nothing else keeps the connection from being taken for a frozen one's. */
  listen(): void {
    if (this.started) return;
    this.start();
    this.pulse = setInterval(() => {
      if (this.session.up) this.session.query('SELECT').catch(() => this.session.drop());
    }, this.probeMs).unref();
  }

  async stop(): Promise<void> {
    clearInterval(this.pulse);
    await this.session.stop();
  }
}
