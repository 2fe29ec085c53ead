import { crashServer, cutBeat, cutEffect, cutMain, cutPool, restartServer } from './database-faults';
import type { Fault } from './fault';
import { block, freeze, kill, redeploy } from './process-faults';

export type { Fault, Stage } from './fault';

export const FAULTS = {
  kill,
  freeze,
  redeploy,
  block,
  cutPool,
  cutBeat,
  cutMain,
  cutEffect,
  crashServer,
  restartServer,
} satisfies Record<string, Fault>;

export type FaultName = keyof typeof FAULTS;

/**
 * Which faults a scenario is made of, each as often as it stands there; and the pause between two, in ms. Some worker must live for a TTL now and then:
 * who has not had one of steady beats declares nobody dead, since after a gap it was the database that was away.
 */
export const SCENARIOS: Record<string, { faults: readonly FaultName[]; everyMs: readonly [number, number] }> = {
  kill: { faults: ['kill'], everyMs: [1500, 4000] },
  freeze: { faults: ['freeze'], everyMs: [100, 1000] },
  deploy: { faults: ['redeploy'], everyMs: [1000, 3000] },
  block: { faults: ['block'], everyMs: [300, 2000] },
  cut: { faults: ['cutPool', 'cutPool', 'cutBeat', 'cutMain', 'cutEffect'], everyMs: [50, 400] },
  server: { faults: ['crashServer', 'restartServer'], everyMs: [2000, 6000] },
  all: {
    faults: [
      'kill',
      'kill',
      'freeze',
      'redeploy',
      'block',
      'cutPool',
      'cutPool',
      'cutBeat',
      'cutMain',
      'cutEffect',
      'crashServer',
    ],
    everyMs: [300, 2000],
  },
};
