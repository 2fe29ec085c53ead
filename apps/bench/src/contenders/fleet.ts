import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { promisify } from 'node:util';
import { PEERS_FOLDER } from '../paths';
import { AgentProcess } from './agent-process';
import type { ContenderName } from './contender';

/** All agents of a benchmark, each on the same Node, each ended by its process id. */
export class Fleet {
  private readonly agents = new Set<AgentProcess>();

  constructor(private readonly node: string) {}

  /** Resolves when the adapter is loaded. */
  async start(contender: ContenderName | 'none', role: string): Promise<AgentProcess> {
    const agent = new AgentProcess(`${contender} (${role})`, this.node, adapterUrl(contender));
    this.agents.add(agent);
    void agent.exited.then(() => this.agents.delete(agent));
    await agent.ready;
    return agent;
  }

  /** Version of the Node that all agents run on. */
  async nodeVersion(): Promise<string> {
    const { stdout } = await promisify(execFile)(this.node, ['--version']);
    return stdout.trim().replace(/^v/, '');
  }

  async end(agent: AgentProcess): Promise<void> {
    agent.kill('SIGKILL');
    await agent.exited;
  }

  async endAll(): Promise<void> {
    await Promise.all([...this.agents].map((agent) => this.end(agent)));
  }
}

function adapterUrl(contender: ContenderName | 'none'): string {
  const own = { ours: 'leasehold.js', none: 'none.js' };
  return pathToFileURL(
    contender === 'ours' || contender === 'none'
      ? join(__dirname, own[contender])
      : join(PEERS_FOLDER, `${contender}.mjs`),
  ).href;
}
