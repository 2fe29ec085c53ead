import { connect, createServer, type AddressInfo, type Server, type Socket } from 'node:net';
import { gate, type Gate } from './gate';
import { ProxiedConnection } from './proxied-connection';

/** Which connections: all, or those of a session's `application_name`. */
export type Selector = { applicationName: string | RegExp } | undefined;

/** A rule that makes replies get lost. */
export interface LostReply {
  /** How many replies were lost so far. */
  readonly count: number;
  /** Settles when the first reply was lost. */
  readonly happened: Promise<void>;
  cancel(): void;
}

type State = { frozen: boolean; delayMs: number };
type Change = { selector: Selector; change: Partial<State> };

/**
 * A line on 127.0.0.1 to a PostgreSQL server, which the test can freeze, cut and slow down, as a whole or for the
 * connections of one `application_name`. What was set for a selector also holds for connections that come later.
 */
export class TcpProxy {
  readonly port: number;
  private readonly connections = new Set<ProxiedConnection>();
  private changes: Change[] = [];
  private rules: { selector: Selector; rule: ProxiedConnection['rules'][number] }[] = [];
  private isRefusing = false;

  private constructor(
    private readonly listener: Server,
    private target: { host: string; port: number },
  ) {
    this.port = (listener.address() as AddressInfo).port;
    listener.on('connection', (client) => this.accept(client));
  }

  /** Opens a line to the server of a url. */
  static async start(url: string): Promise<TcpProxy> {
    const { hostname, port } = new URL(url);
    const listener = createServer({ allowHalfOpen: true });
    await new Promise<void>((resolve, reject) => {
      listener.once('error', reject);
      listener.listen(0, '127.0.0.1', resolve);
    });
    return new TcpProxy(listener, { host: hostname, port: Number(port || 5432) });
  }

  /** The same url by way of this line. */
  url(forUrl: string): string {
    const url = new URL(forUrl);
    url.hostname = '127.0.0.1';
    url.port = String(this.port);
    return url.href;
  }

  /** `application_name` of each open connection. */
  get names(): string[] {
    return [...this.connections].map(({ applicationName }) => applicationName ?? '(not told yet)');
  }

  /** Nothing passes any more, no end of a connection either; new ones are taken and get no answer. */
  freeze(selector?: Selector): void {
    this.set(selector, { frozen: true });
  }

  /** What was held up passes on. */
  thaw(selector?: Selector): void {
    this.set(selector, { frozen: false });
  }

  /** Every chunk takes this much longer, in both directions; 0 ends it. */
  delay(ms: number, selector?: Selector): void {
    this.set(selector, { delayMs: ms });
  }

  /** Ends the open connections, as a reset for the client; returns how many. New ones work. */
  cut(selector?: Selector): number {
    const chosen = [...this.connections].filter((connection) => matches(selector, connection));
    for (const connection of chosen) connection.cut();
    return chosen.length;
  }

  /**
   * One side of the open connections ends, and the other is never told: half-open, as behind a machine that lost its power ('server' ends), or
   * a NAT that forgot ('client'). Until a thaw, a cut or the end. Returns how many.
   */
  forsake(side: 'client' | 'server', selector?: Selector): number {
    const chosen = [...this.connections].filter((connection) => matches(selector, connection));
    for (const connection of chosen) connection.forsake(side);
    return chosen.length;
  }

  /** Refuses new connections (a server that is away) and ends the open ones, until `refuse(false)`. */
  refuse(refusing = true): void {
    this.isRefusing = refusing;
    if (refusing) this.cut();
  }

  /**
   * Passes a request that matches on to the server, lets the server finish it, its commit included, and cuts the
   * connection in place of the reply. `times` such requests, default 1. The bytes of the request are seen as latin1;
   * a named statement shows its text only when it is prepared.
   */
  dropRepliesAfter(
    pattern: RegExp | ((request: string) => boolean),
    { times = 1, ...selector }: { times?: number; applicationName?: string | RegExp } = {},
  ): LostReply {
    let left = times;
    let count = 0;
    const happened: Gate = gate();
    const rule = {
      matches: (request: string) => (typeof pattern === 'function' ? pattern(request) : request.search(pattern) >= 0),
      take: () => left-- > 0,
      lost: () => {
        count++;
        happened.open();
      },
    };
    const { applicationName } = selector;
    const entry = { selector: applicationName === undefined ? undefined : { applicationName }, rule };
    this.rules.push(entry);
    this.applyRules();
    return {
      get count() {
        return count;
      },
      happened: happened.promise,
      cancel: () => {
        this.rules = this.rules.filter((other) => other !== entry);
        this.applyRules();
      },
    };
  }

  /** New connections go to this URL's server from here on, as behind an address that has moved. */
  retarget(url: string): void {
    const { hostname, port } = new URL(url);
    this.target = { host: hostname, port: Number(port) };
  }

  /** Ends everything; the port is free afterwards. */
  async close(): Promise<void> {
    const closed = new Promise<void>((resolve) => this.listener.close(() => resolve()));
    this.cut();
    await closed;
  }

  private accept(client: Socket): void {
    if (this.isRefusing) {
      client.on('error', () => undefined);
      client.resetAndDestroy();
      return;
    }
    const server = connect({ ...this.target, allowHalfOpen: true });
    for (const socket of [client, server]) socket.setNoDelay(true);
    const connection: ProxiedConnection = new ProxiedConnection(
      client,
      server,
      () => this.applyAll(connection),
      () => this.connections.delete(connection),
    );
    this.connections.add(connection);
    this.applyAll(connection);
  }

  private set(selector: Selector, change: Partial<State>): void {
    // What is set for all takes the place of everything said before on the same matter.
    const overridden = (key: string): boolean => selector === undefined && key in change;
    this.changes = this.changes.filter((earlier) => !Object.keys(earlier.change).every(overridden));
    this.changes.push({ selector, change });
    for (const connection of this.connections) if (matches(selector, connection)) apply(connection, change);
  }

  private applyAll(connection: ProxiedConnection): void {
    for (const { selector, change } of this.changes) if (matches(selector, connection)) apply(connection, change);
    this.applyRules();
  }

  private applyRules(): void {
    for (const connection of this.connections) {
      connection.rules = this.rules.filter(({ selector }) => matches(selector, connection)).map(({ rule }) => rule);
    }
  }
}

function matches(selector: Selector, { applicationName }: ProxiedConnection): boolean {
  if (selector === undefined) return true;
  if (applicationName === undefined) return false;
  const wanted = selector.applicationName;
  return typeof wanted === 'string' ? wanted === applicationName : applicationName.search(wanted) >= 0;
}

function apply(connection: ProxiedConnection, { frozen, delayMs }: Partial<State>): void {
  if (delayMs !== undefined) connection.delay(delayMs);
  if (frozen !== undefined) connection.freeze(frozen);
}
