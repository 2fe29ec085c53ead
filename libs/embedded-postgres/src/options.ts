/** How to start the server; every field is optional. */
export interface EmbeddedPostgresOptions {
  /** Database that exists once the server is up; created when missing. Default `leasehold`. */
  database?: string;
  /** Folder that keeps the data between runs. Default: a temporary one, removed at the end, however the end comes. */
  dataDir?: string;
  /** More server settings (`{ wal_level: 'logical' }`); they win over the ones of this package. */
  settings?: Record<string, string>;
  /**
   * Whether data must survive a crash of the *machine* (fsync, full_page_writes). A crash of the server alone loses
   * nothing either way. Default `false` for temporary data, `true` with `dataDir`.
   */
  durable?: boolean;
  /** Fills the empty temporary data folder in place of initdb, for instance with a copy of a primary. */
  populate?: (dataDir: string) => Promise<void>;
}

/** `fast` ends the sessions and writes a checkpoint; `immediate` is a crash: the next start recovers from the log. */
export type ShutdownMode = 'fast' | 'immediate';

/** A running server. Anybody on this machine may connect: it is meant for demos and tests. */
export interface EmbeddedPostgres {
  /** `postgres://postgres@127.0.0.1:<port>/<database>`. */
  readonly url: string;
  readonly port: number;
  /** Process id of the server; another one after {@link restart}. */
  readonly pid: number;
  readonly dataDir: string;
  /** Stops the server and removes temporary data. Calling it again, or while it runs, waits for the same end. */
  stop(): Promise<void>;
  /** Stops the server and starts it again on the same port and data. Default `fast`. */
  restart(mode?: ShutdownMode): Promise<void>;
}
