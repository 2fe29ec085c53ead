import { PEERS, type PeerName } from '../contenders/contender';
import type { CaseResult, Results } from '../results';
import { ratioText } from './table';

const COLOURS: Record<PeerName, string> = {
  graphile: '#3b6fb6',
  pgboss: '#d1803a',
  bullmq: '#b84a4a',
  bullpg: '#7a6bb0',
};

/** Powers of ten at the ends of the axis; a bar that goes further is cut and says by its number how far it goes. */
const LEAST = -1;
const MOST = 2;

const WIDTH = 920;
const LEFT = 150;
const RIGHT = 80;
const TOP = 74;
const BAR = 11;
const GAP = 12;

interface Bar {
  peer: PeerName;
  ratio: number;
  documented: boolean;
}

const barsOf = (one: CaseResult): Bar[] =>
  PEERS.flatMap((peer) => {
    const ratio = one.ratio[peer];
    return ratio == null || ratio <= 0 ? [] : [{ peer, ratio, documented: one.documented.includes(peer) }];
  });

function xOf(ratio: number): number {
  const share = (Math.min(MOST, Math.max(LEAST, Math.log10(ratio))) - LEAST) / (MOST - LEAST);
  return Math.round(LEFT + share * (WIDTH - LEFT - RIGHT));
}

const escaped = (text: string): string =>
  text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('"', '&quot;');

function text(x: number, y: number, content: string, more = ''): string {
  return `<text x="${x}" y="${y}" ${more}>${escaped(content)}</text>`;
}

function barSvg({ peer, ratio, documented }: Bar, y: number): string {
  const one = xOf(1);
  const x = xOf(ratio);
  const look = documented ? `fill="none" stroke="${COLOURS[peer]}"` : `fill="${COLOURS[peer]}"`;
  const label = `${ratioText(ratio)}${documented ? ' *' : ''}`;
  const width = Math.max(1, Math.abs(x - one));
  return [
    `<rect x="${Math.min(x, one)}" y="${y}" width="${width}" height="${BAR - 2}" ${look}/>`,
    ratio >= 1 ? text(x + 4, y + BAR - 3, label) : text(x - 4, y + BAR - 3, label, 'text-anchor="end"'),
  ].join('');
}

function legend(results: Results): string {
  const shown = PEERS.filter((peer) => results.contenders[peer]);
  return shown
    .map((peer, i) => {
      const x = LEFT + i * 185;
      const { title = peer, version = '' } = results.contenders[peer] ?? {};
      return `<rect x="${x}" y="34" width="10" height="10" fill="${COLOURS[peer]}"/>${text(x + 15, 43, `${title} ${version}`)}`;
    })
    .join('\n');
}

function axis(bottom: number): string {
  return [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
    .map((ratio) => {
      const x = xOf(ratio);
      const look = ratio === 1 ? 'stroke="#222" stroke-width="1.5"' : 'stroke="#ddd"';
      return `<line x1="${x}" y1="${TOP - 6}" x2="${x}" y2="${bottom}" ${look}/>${text(x, TOP - 12, `${ratio}×`, 'text-anchor="middle" fill="#555"')}`;
    })
    .join('\n');
}

/** How many times better Leasehold is than each peer, case by case, on a logarithmic axis. */
export function chartOf(results: Results): string {
  const rows: string[] = [];
  let y = TOP;
  for (const one of results.cases) {
    const bars = barsOf(one);
    if (bars.length === 0) continue;
    const middle = y + (bars.length * BAR) / 2 + 4;
    rows.push(text(LEFT - 44, middle, one.case, 'text-anchor="end" font-weight="bold"'));
    bars.forEach((bar, i) => rows.push(barSvg(bar, y + i * BAR)));
    y += bars.length * BAR + GAP;
  }
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${y + 24}" font-family="sans-serif" font-size="11" fill="#222">
<rect width="${WIDTH}" height="${y + 24}" fill="#fff"/>
${text(LEFT, 20, 'How many times better Leasehold is: right of 1× better, left of it worse', 'font-size="14"')}
${legend(results)}
${axis(y)}
${rows.join('\n')}
${text(LEFT, y + 14, '* outlined: the limit in the documentation of the peer, not a measurement. Bars are cut at 0.1× and 100×.', 'fill="#555"')}
</svg>
`;
}
