import type { Socket } from 'node:net';
import { ReplyReader, StartupReader } from './pg-wire';
import { ProxyPipe } from './proxy-pipe';

/** What the proxy does with replies to requests that match. */
export interface ReplyRule {
  matches: (request: string) => boolean;
  /** Called when the request was met; false when the rule is used up. */
  take: () => boolean;
  /** Called when the reply was complete and lost. */
  lost: () => void;
}

// A statement may arrive in pieces: this much of what came before is looked at again.
const REMEMBERED_CHARS = 8_192;

/** A client, the server behind, and what passes between. */
export class ProxiedConnection {
  readonly toServer: ProxyPipe;
  readonly toClient: ProxyPipe;
  rules: ReplyRule[] = [];
  private readonly startup = new StartupReader();
  private readonly replies = new ReplyReader();
  private recent = '';
  private losing: ReplyRule | undefined;

  constructor(
    private readonly client: Socket,
    private readonly server: Socket,
    private readonly onIdentified: () => void,
    onClosed: () => void,
  ) {
    this.toServer = new ProxyPipe(client, server, (chunk) => this.request(chunk));
    this.toClient = new ProxyPipe(server, client, (chunk) => this.reply(chunk));
    for (const [socket, other] of [
      [client, server],
      [server, client],
    ] as const) {
      // A frozen line hides even the reset of one side from the other.
      socket.on('error', () => {
        if (!this.toClient.frozen && !this.toServer.frozen) other.destroy();
      });
      socket.on('close', () => {
        if (client.destroyed && server.destroyed) onClosed();
      });
    }
  }

  /** From the startup packet; undefined until it came, empty when the client gave none. */
  get applicationName(): string | undefined {
    return this.startup.parameters && (this.startup.parameters.application_name ?? '');
  }

  freeze(frozen: boolean): void {
    this.toServer.frozen = frozen;
    this.toClient.frozen = frozen;
    if (frozen) return;
    if (this.client.destroyed) this.server.destroy();
    if (this.server.destroyed) this.client.destroy();
  }

  delay(ms: number): void {
    this.toServer.delayMs = ms;
    this.toClient.delayMs = ms;
  }

  /** Ends one side; a frozen line hides it from the other. */
  forsake(side: 'client' | 'server'): void {
    this.freeze(true);
    if (side === 'server') this.server.destroy();
    else if (this.client.writableEnded) this.client.destroy();
    else this.client.resetAndDestroy();
  }

  /** Ends both sides at once; the client sees a reset connection. */
  cut(): void {
    this.toServer.destroy();
    this.toClient.destroy();
    // A socket that is shutting down cannot be reset: Node would leave its handle open, and never exit.
    if (this.client.writableEnded) this.client.destroy();
    else if (!this.client.destroyed) this.client.resetAndDestroy();
    this.server.destroy();
  }

  private request(chunk: Buffer): Buffer {
    if (this.applicationName === undefined) {
      this.startup.push(chunk);
      if (this.applicationName !== undefined) this.onIdentified();
    }
    if (this.rules.length > 0 && this.losing === undefined) {
      const text = this.recent + chunk.toString('latin1');
      this.losing = this.rules.find((rule) => rule.matches(text) && rule.take());
      this.recent = text.slice(-REMEMBERED_CHARS);
    } else {
      this.recent = '';
    }
    return chunk;
  }

  private reply(chunk: Buffer): Buffer | undefined {
    if (this.startup.awaitsSingleByte) {
      this.startup.awaitsSingleByte = false;
      return chunk;
    }
    const endsReply = this.replies.push(chunk);
    if (this.losing === undefined) return chunk;
    if (endsReply) {
      this.losing.lost();
      this.cut();
    }
    return undefined;
  }
}
